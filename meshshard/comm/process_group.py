"""A transport over torch.distributed; the only module that calls its collectives."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed import _functional_collectives as functional
from torch.utils.data import get_worker_info

from meshshard.comm.matching import Matching, call_of, end_calls, matching_of
from meshshard.comm.transport import Transport, Work
from meshshard.comm.workers import inherited, not_a_rank
from meshshard.processes import loopback_interface

__all__ = ["ProcessGroupTransport", "host_store"]

T = TypeVar("T")
_by_name: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()
REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class ProcessGroupTransport(Transport):
    """The collectives of a process group (gloo or NCCL).

    Under torch.compile it calls torch's functional collectives, which can be traced.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if inherited():
            raise not_a_rank()
        self.group = group or dist.group.WORLD
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        _by_name[self.group.group_name] = self.group

    @classmethod
    def by_name(cls, name: str) -> ProcessGroupTransport | None:
        """The transport of a group that this process, which is a rank, has made a domain of."""
        group = None if inherited() else _by_name.get(name)
        return None if group is None else cls(group)

    @classmethod
    def default(cls, device: torch.device, timeout: float) -> ProcessGroupTransport | None:
        """The default process group; if there is none, initialize it from `env://`.

        A group that is initialized here is destroyed when the interpreter exits. If all ranks are
        on this machine, they listen on the loopback interface only.

        Args:
            device: the backend is NCCL for CUDA devices, else gloo.
            timeout: seconds to wait for other ranks.

        Returns:
            None for a single rank without a process group.
        """
        if dist.is_initialized():
            return cls(dist.group.WORLD)
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return None
        if get_worker_info() is not None:
            raise not_a_rank()
        backend = "nccl" if device.type == "cuda" else "gloo"
        limit = timedelta(seconds=timeout)
        store = _loopback_store(limit)
        if backend == "gloo" and (store or _one_machine()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
        rank, size = (int(os.environ[v]) if store else -1 for v in ("RANK", "WORLD_SIZE"))
        dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=size)
        transport = cls(dist.group.WORLD)
        if backend == "gloo":  # also a barrier: no rank may exit while others still connect to it
            matching_of(transport.group, transport._gather)
        atexit.register(transport.close)
        return transport

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """See `Transport`."""
        if torch.compiler.is_compiling():
            out: Tensor = functional.all_reduce(x, op, self.group)
            return out
        call = call_of("all_reduce", op, tuple(x.shape), x.dtype)
        matching = self._matching()
        certain = matching.enter(call, self._gather, early=x.is_cpu)
        work = dist.all_reduce(x, REDUCTIONS[op], group=self.group, async_op=True)
        if certain:
            work.wait()
        else:
            matching.finish(call, work)
        return x

    def start_all_to_all(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> tuple[Tensor, Work | None]:
        """See `Transport`."""
        if torch.compiler.is_compiling():
            rows = functional.all_to_all_single(x, list(receive), list(send), self.group)
            return functional.wait_tensor(rows), None  # type: ignore[no-untyped-call]
        call = call_of("all_to_all", tuple(x.shape[1:]), x.dtype, send=send, receive=receive)
        self._matching().enter(call, self._gather)
        rows = x.new_empty((sum(receive), *x.shape[1:]))
        work = dist.all_to_all_single(
            rows, x.contiguous(), list(receive), list(send), group=self.group, async_op=True
        )
        return rows, work

    def gather_objects(self, value: T) -> list[T]:
        """See `Transport`."""
        self._matching().enter(call_of("gather_objects"), self._gather)
        return self._gather(value)

    def _gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _matching(self) -> Matching:
        """Where calls are compared with those of the other ranks.

        Raises:
            DomainError: this process is not a rank but a fork of one.
        """
        if inherited():
            raise not_a_rank()
        assert self.group is not None
        return matching_of(self.group, self._gather)

    def close(self) -> None:
        """Destroy the process group if it is the default one.

        The last reference to the group is dropped here, so that gloo joins its threads before the
        interpreter exits; else the process may abort ("terminate called without an active
        exception").
        """
        if self.group is dist.group.WORLD and self.group is not None:
            end_calls(self.group)
            self.group = None
            dist.destroy_process_group()


def _one_machine() -> bool:
    """Whether the launcher says that all ranks are on this machine."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def _loopback_store(limit: timedelta) -> TCPStore | None:
    """The store of ranks whose master has a loopback address, which `env://` would serve to all.

    Returns:
        None if the address is another one, or the launcher serves the store.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if served or host not in ("127.0.0.1", "localhost") or "RANK" not in os.environ:
        return None
    if os.environ["RANK"] == "0":
        return host_store(socket.create_server(("127.0.0.1", port)))
    return TCPStore("127.0.0.1", port, is_master=False, timeout=limit)


def host_store(listener: socket.socket) -> TCPStore:
    """A TCPStore for the rendezvous of the ranks, served on a socket that is already listening.

    Ranks connect to it by `env://` if TORCHELASTIC_USE_AGENT_STORE is True, as under torchrun. The
    socket is passed in because a TCPStore that opens one listens on all network interfaces.

    Args:
        listener: listening socket; the store takes ownership of it and closes it.
    """
    host, port = listener.getsockname()
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
