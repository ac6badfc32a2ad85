"""Private names of PyTorch: all that meshshard uses above `comm`, each with the reason.

PyTorch may change any of them in a minor release; `tests/test_torch_private.py` then says which.
`comm.linear`, which cannot import from here, also uses `torch._C._are_functorch_transforms_active`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.multiprocessing.reductions
import torch.nn.functional as F  # noqa: N812
import torch.utils.dlpack
from torch._functorch import eager_transforms

Function = TypeVar("Function", bound=Callable[..., Any])

# --------------------------------------------------------------------------- state of the thread
native = torch._C.DisableTorchFunctionSubclass
"""Context manager: `__torch_function__` of subclasses is off, so a ShardTensor behaves as the plain
tensor of its owned rows. Subclasses made by `as_subclass` have no public, cheap alternative."""

current_autograd_node = torch._C._current_autograd_node
"""The node that backward executes on this thread, or None: the only sign that backward runs."""

forward_mode_enabled = torch._C._is_fwd_grad_enabled
"""False inside `autograd.Function.forward`, where torch switches forward-mode AD off: the only sign
that a user's own function is running."""

in_transform = torch._C._are_functorch_transforms_active
"""Whether a transform of torch.func (`vmap`, `grad`, …) runs on this thread."""

StorageWeakRef = torch.multiprocessing.reductions.StorageWeakRef
"""Whether memory still exists, whichever tensors share it."""

# ------------------------------------------------------------------------------ names of functions
NN: Any = torch._C._nn
"""The C++ functions behind `torch.nn.functional`: the same objects (`F.gelu`), or called directly
instead of those by code that torch.fx or TorchDynamo has generated (`silu`, `pad`)."""

VF: Any = torch._C._VariableFunctions
"""The C++ functions that `torch.meshgrid` and `torch.atleast_1d` call if they get a list."""

ORIGINALS: Any = torch._C._VariableFunctions
"""The functions of `torch` itself: PyG replaces `torch.index_select` and `torch.select` by its own,
which call these."""

is_left_aligned = torch._nested_tensor_from_mask_left_aligned
"""What `nn.TransformerEncoder` asks about a padding mask before it makes nested tensors."""

FOREACH_NORM = torch._foreach_norm
"""What `clip_grad_norm_(foreach=True)` calls on a list of gradients."""

UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
"""What `torch.amp.GradScaler` calls on a list of gradients."""

legacy_reduction: Callable[[Any, Any], str] = F._Reduction.legacy_get_string  # type: ignore[attr-defined]
"""The `reduction` that a loss's deprecated `size_average` and `reduce` stand for."""

unsafe_view: Callable[..., torch.Tensor] = torch.ops.aten._unsafe_view
"""A reshape that autograd does not record as a view, which FSDP2's hooks on its result need."""

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
"""Flash attention on a CPU that returns the log-sum-exp, by which blocks of keys are merged."""


def foreach_functions() -> list[Callable[..., Any]]:
    """What optimizers call on lists of tensors, without those that reduce a tensor to a number."""
    names = [n for n in dir(torch) if n.startswith(("_foreach_", "_fused_ad", "_fused_sgd"))]
    reductions = ("_foreach_norm", "_foreach_powsum", "_foreach_max")
    return [getattr(torch, n) for n in names if n not in reductions]


# ------------------------------------------------------------------------------------ TorchDynamo
def not_compiled(func: Function) -> Function:
    """Decorator: where its frame runs, TorchDynamo compiles neither it nor what it calls.

    `torch.compiler.disable` does the same, but imports `torch._dynamo`, which takes longer than
    `import torch`.
    """
    dynamo = torch._C._dynamo.eval_frame
    if hasattr(dynamo, "set_code_exec_strategy"):
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(func.__code__, dynamo._FrameExecStrategy(skip, skip))
    return func


def unsupported_by_dynamo(message: str) -> Exception:
    """The exception on which TorchDynamo breaks the graph, or reports with `fullgraph=True`."""
    from torch._dynamo.exc import Unsupported

    return Unsupported(message, "a ShardTensor")


# ------------------------------------------------------------------------------ no torch function
UNASKED = (
    (torch._C.ScriptFunction, "__call__", "TorchScript"),
    (eager_transforms, "_wrap_tensor_for_grad", "torch.func"),
    (eager_transforms, "_maybe_wrap_functional_tensor", "torch.func.functionalize"),
    (torch.utils.dlpack, "to_dlpack", "torch.utils.dlpack.to_dlpack"),
)
"""Functions of PyTorch that take a ShardTensor as the plain tensor of its owned rows without asking
`__torch_function__`: owner, attribute, what users call. Constructors do the same
(`torch.tensor(x)`, `torch.Tensor(x)`, `torch.sparse_coo_tensor(i, x)`), but are not replaced:
torch.compile, TorchScript and pickle know them by identity."""


def check_unasked(check: Callable[[str, Sequence[Any], Mapping[str, Any]], None]) -> None:
    """Have a check called before the functions of `UNASKED`.

    Args:
        check: called with what users call, and the arguments; may raise.
    """
    for owner, attribute, name in UNASKED:
        setattr(owner, attribute, _checked(getattr(owner, attribute), name, check))


def _checked(func: Callable[..., Any], name: str, check: Callable[..., None]) -> Any:
    @wraps(func)
    def _call(*args: Any, **kwargs: Any) -> Any:
        check(name, args, kwargs)
        return func(*args, **kwargs)

    return _call


# --------------------------------------------------------------------------------- the call stack
# These functions of PyTorch read a tensor in a way that is wrong for a ShardTensor and pass no
# argument that says so; each caller below turns that into an error that names the remedy.
def called_by_vmap() -> bool:
    """Whether `torch.vmap` asks a rule for the size of the dim that it maps over."""
    return sys._getframe(3).f_code.co_filename.endswith("_functorch/vmap.py")


def called_by_ddp() -> bool:
    """Whether `DistributedDataParallel` detaches a buffer to broadcast it from rank 0."""
    return sys._getframe(3).f_code.co_name == "_sync_module_states"


def called_by_dtensor() -> bool:
    """Whether a `DTensor` is being made of a tensor."""
    return _called_by("torch/distributed/tensor/_api.py")


def called_by_fake_tensor() -> bool:
    """Whether `torch.compile` is making a fake tensor, without data, of an argument."""
    return _called_by("torch/_subclasses/meta_utils.py")


def in_checkpoint() -> bool:
    """Whether the running `autograd.Function` is that of `torch.utils.checkpoint`."""
    return _called_by("torch/utils/checkpoint.py", "forward")


def called_by_message_passing() -> bool:
    """Whether a convolution of PyG takes the rows of its edges."""
    return _called_by("torch_geometric/nn/conv/message_passing.py")


def _called_by(file: str, function: str = "") -> bool:
    """Whether a function of a file, by default any, is on the call stack."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(file) and function in ("", code.co_name):
            return True
        frame = frame.f_back
    return False


def tensors_of_module_hook() -> list[Any] | None:
    """The tensors for which `nn.Module` sets up a full backward hook; None outside of that.

    It hooks the node that all of them have in common.
    """
    frame: FrameType | None = sys._getframe(3)
    for _ in range(2):  # in a list comprehension, which has a frame of its own before Python 3.12
        if frame is not None and frame.f_code.co_name == "_apply_on_tensors":
            return list(frame.f_locals["new_tensors"])
        frame = frame and frame.f_back
    return None


def l1_loss_weight() -> Any:
    """The `weight` of the running `F.l1_loss`, which it does not pass to `__torch_function__`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back
    return frame.f_locals.get("weight") if frame is not None else None
