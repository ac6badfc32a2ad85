"""Built: whether modules are still those that functions of their parameters may stand for."""

from __future__ import annotations

from torch import nn

__all__ = ["has_hooks", "is_unmodified"]

LENGTHS = {"to_out": 1, "linear_pre": 2, "proj_temperature": 4}  # of each sequence
BARE = ("to_q", "to_k", "to_v")  # layers without a bias


def is_unmodified(module: nn.Module, known: tuple[type[nn.Module], ...] = ()) -> bool:
    """Whether the modules inside are those of the start.

    An adapter in place of a layer, one layer more, a hook, another eps or activation are not.

    Args:
        module: the whole; it may itself carry hooks, which run as it is called.
        known: types of larger modules inside, whose parts are looked at too.
    """
    return all(
        not has_hooks(m) and (type(m) in known or _known(name.rpartition(".")[2], m))
        for name, m in module.named_modules()
        if m is not module
    )


def has_hooks(m: nn.Module) -> bool:
    """Whether a module carries hooks, or a forward of its own."""
    hooks = m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks
    return any(hooks) or "forward" in vars(m)


def _known(name: str, m: nn.Module) -> bool:
    """Whether it does what a function makes of its weight and bias."""
    kind = type(m)
    if isinstance(m, nn.Linear):
        return kind is nn.Linear and (name in BARE) == ("bias" not in dict(m.named_parameters()))
    if isinstance(m, nn.LayerNorm):
        return kind is nn.LayerNorm and m.eps == 1e-5 and len(list(m.parameters())) == 2
    if isinstance(m, nn.GELU):
        return kind is nn.GELU and m.approximate == "none"
    return isinstance(m, nn.Sequential) and kind is nn.Sequential and len(m) == LENGTHS.get(name)
