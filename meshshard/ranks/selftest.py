"""Selftest: check on this machine that shards on ranks equal one process, gradients included.

Run it with `meshshard selftest --ranks 4`, or on a cluster with
`torchrun … -m meshshard.ranks.selftest`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.resources import as_file, files
from pathlib import Path

import torch
from torch import Tensor, nn

from meshshard import io
from meshshard.comm import Domain, init_domain
from meshshard.errors import MeshshardError, n_of
from meshshard.partitioning.partition import partition
from meshshard.ranks.shard import Shard, load
from meshshard.tensor import ShardTensor

__all__ = ["main", "run"]

TOLERANCE = 1e-10


def run(shard: Shard) -> Iterator[tuple[str, float]]:
    """Compare the shards of all ranks with the whole mesh.

    Args:
        shard: the shard of this rank; its folder has cell fields.

    Yields:
        What was compared, and the largest difference relative to the largest value.

    Raises:
        MeshshardError: the folder has no shards of cells with a field.
    """
    domain = shard.domain
    mesh = shard.folder.gather()
    if shard.folder.entity != "cells" or not mesh.cell_fields:
        raise MeshshardError(
            f"{shard.folder.path}: the selftest needs shards of cells with a cell field; "
            "partition a mesh by its cells"
        )
    name = next(iter(mesh.cell_fields))
    origin = shard.sharding.origin
    assert origin is not None
    rows = domain.all_gather(origin, shard.sizes.tolist())
    whole = torch.from_numpy(mesh.centers()).to(domain.device)[rows]
    target = torch.from_numpy(mesh.cell_fields[name]).to(domain.device).double()[rows]
    owned = slice(shard.sharding.first, shard.sharding.first + shard.sharding.own)
    x = ShardTensor.from_local(whole[owned].clone(), shard.sharding)
    y = ShardTensor.from_local(target[owned].clone(), shard.sharding)
    yield "owned rows of a field", _difference(y.gather(), target)
    yield "halo rows", _halo(shard, whole)
    yield "adjoint of the exchange", _adjoint(shard)
    yield from _model(domain, (whole, target), (x, y))


def _halo(shard: Shard, whole: Tensor) -> float:
    first = shard.sharding.first
    local = shard.domain.exchange(whole[first : first + shard.sharding.own], shard.exchange)
    ids = torch.from_numpy(shard.plan.halo.astype("int64")).to(whole.device)
    return _difference(local[shard.plan.n_owned :], whole[ids])


def _adjoint(shard: Shard) -> float:
    """Relative difference of <A x, y> and <x, A* y>, summed over all ranks."""
    generator = torch.Generator().manual_seed(shard.domain.rank)
    n, m = shard.plan.n_owned, shard.plan.n_local
    x = torch.randn(n, 3, dtype=torch.float64, generator=generator).requires_grad_()
    y = torch.randn(m, 3, dtype=torch.float64, generator=generator)
    x = x.to(shard.domain.device).detach().requires_grad_()
    out = shard.domain.exchange(x, shard.exchange)
    (back,) = torch.autograd.grad(out, x, y.to(out.device))
    sums = torch.stack([(out.detach() * y.to(out.device)).sum(), (x.detach() * back).sum()])
    left, right = shard.domain.all_reduce(sums).tolist()
    return float(abs(left - right) / max(abs(left), 1e-30))


def _model(
    domain: Domain, whole: tuple[Tensor, Tensor], parts: tuple[ShardTensor, ShardTensor]
) -> Iterator[tuple[str, float]]:
    """Loss and gradients of a small network with global norms, sharded and serial."""
    serial, sharded = _network(domain), _network(domain)
    x = whole[0].clone().requires_grad_()
    loss = _loss(serial, x, whole[1])
    loss.backward()  # type: ignore[no-untyped-call]
    parts[0].requires_grad_()
    got = _loss(sharded, parts[0], parts[1])
    got.backward()  # type: ignore[no-untyped-call]
    domain.average_gradients(sharded)
    yield "loss of a network with norms", _difference(got.detach(), loss.detach())
    grad = parts[0].grad
    assert isinstance(grad, ShardTensor)
    assert x.grad is not None
    yield "gradient of the coordinates", _difference(grad.gather(), x.grad)
    pairs = zip(sharded.parameters(), serial.parameters(), strict=True)
    worst = max(_difference(_grad(a), _grad(b)) for a, b in pairs)
    yield "gradients of the parameters", worst


def _network(domain: Domain) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 16), nn.GELU(), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.LayerNorm(16),
        nn.Tanh(), nn.Linear(16, 1),
    )  # fmt: skip
    return model.double().to(domain.device)


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    scale = y.std()
    out: Tensor = ((model(x)[:, 0] - y / scale).softmax(0) * y / scale).sum()
    out += (model(x)[:, 0] - y / scale).square().mean()
    return out


def _grad(p: Tensor) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad


def _difference(got: Tensor, wanted: Tensor) -> float:
    if not wanted.numel():
        return 0.0
    return float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))


def main(words: list[str] | None = None) -> int:
    """Run the selftest on this rank; rank 0 prints.

    Returns:
        0 if every difference is at most 1e-10, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m meshshard.ranks.selftest")
    parser.add_argument("--folder", help="folder of shards of cells, with cell fields")
    args = parser.parse_args(words)
    domain = init_domain()
    with tempfile.TemporaryDirectory() as place:
        path = args.folder or _partitioned(domain, Path(place))
        found = list(run(load(path, domain)))
        domain.share(None)  # a barrier: the folder is removed after all ranks have read it
    worst = max(d for of_rank in domain.share([d for _, d in found]) for d in of_rank)
    if domain.rank == 0:
        for what, difference in found:
            _write(f"  {what:32} {difference:.1e}")
        verdict = "equal" if worst <= TOLERANCE else "NOT equal"
        ranks = n_of(domain.size, "ranks")
        _write(f"{ranks} and one: {verdict} (largest relative difference {worst:.1e})")
    domain.close()
    return 0 if worst <= TOLERANCE else 1


def _partitioned(domain: Domain, place: Path) -> str:
    """Partition the surface in the package on rank 0; the path of the folder, on every rank."""

    def _save() -> str:
        with as_file(files("meshshard") / "data" / "boundary_1.vtp") as source:
            return str(partition(io.read(source), max(8, domain.size)).save(place / "own.shards"))

    save: Callable[[], str] = _save if domain.rank == 0 else lambda: ""
    return domain.share(domain.run_collectively(save, "selftest"))[0]


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        code = main()
    except MeshshardError as error:
        raise SystemExit(f"error: {error}") from None
    raise SystemExit(code)
