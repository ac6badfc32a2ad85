"""is_unmodified: whether a fast path may use the parameters of modules without calling them."""

from __future__ import annotations

from torch import nn

__all__ = ["has_hooks", "is_unmodified"]

LENGTHS = {"to_out": 1, "linear_pre": 2, "proj_temperature": 4}  # layers of each nn.Sequential
WITHOUT_BIAS = ("to_q", "to_k", "to_v")


def is_unmodified(module: nn.Module, known: tuple[type[nn.Module], ...] = ()) -> bool:
    """Whether all submodules are still those that the constructor made.

    An adapter in place of a layer, an additional layer, a hook, or another eps or activation makes
    the answer False.

    Args:
        module: the module to inspect; hooks on itself are allowed, because it is called.
        known: types of larger submodules, whose own submodules are inspected.
    """
    return all(
        not has_hooks(m) and (type(m) in known or _is_standard(name.rpartition(".")[2], m))
        for name, m in module.named_modules()
        if m is not module
    )


def has_hooks(m: nn.Module) -> bool:
    """Whether a module has hooks, or its `forward` was replaced on the instance."""
    hooks = m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks
    return any(hooks) or "forward" in vars(m)


def _is_standard(name: str, m: nn.Module) -> bool:
    """Whether a module computes what its type, weight and bias say."""
    kind = type(m)
    if isinstance(m, nn.Linear):
        has_bias = "bias" in dict(m.named_parameters())
        return kind is nn.Linear and has_bias == (name not in WITHOUT_BIAS)
    if isinstance(m, nn.LayerNorm):
        return kind is nn.LayerNorm and m.eps == 1e-5 and len(list(m.parameters())) == 2
    if isinstance(m, nn.GELU):
        return kind is nn.GELU and m.approximate == "none"
    return isinstance(m, nn.Sequential) and kind is nn.Sequential and len(m) == LENGTHS.get(name)
