"""The gradient of a layer of slice attention, tile by tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from meshshard.nn.slices._layer import Layer, Run, by_heads, collected, means, only_answer
from meshshard.tensor.rules.reductions import wide

__all__ = ["Backward", "Gradients", "leaf", "vjp"]

Found = Sequence[Tensor | None]


class Backward:
    """Two passes back over the rows of one layer, around its stage of tokens."""

    def __init__(
        self, layer: Layer, run: Run, x: Tensor, total: Tensor, kept: list[Tensor] | None
    ) -> None:
        self.x, self.run, self.kept, self.tiles = x, run, kept, run.tiles()
        self.alone = layer.after.function is only_answer
        self.middle = None if kept else torch.empty_like(x)
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in layer.tensors]
        self.layer = layer.on(leaves)
        self.mass = (total[..., -1] + layer.eps)[..., None]
        self.means = means(total, layer.eps, x.dtype).requires_grad_()
        with torch.enable_grad():
            self.answers = self.layer.tokens(self.means)
        names = [f.name for f in fields(layer)][:-1]
        pairs = zip(names, self.layer.pieces, strict=True)
        self.sums = {name: Gradients(piece.tensors) for name, piece in pairs}

    def gradients(self, grad: Tensor) -> Found:
        """Those of the rows and of all tensors."""
        direct, at_values, to_answers = self._from_output(grad)
        tensors = self.layer.tokens.tensors
        found = vjp([self.answers], [self.means, *tensors], [to_answers])
        self.sums["tokens"].add(found[1:])
        assert found[0] is not None
        to_means = self.run.domain.all_reduce(found[0].to(self.mass.dtype))
        to_sums = to_means / self.mass
        to_mass = -(to_sums * self.means).sum(-1)
        gx = self._to_input(direct, at_values, to_sums, to_mass)
        return [gx, *(t for sums in self.sums.values() for t in sums.result())]

    def _from_output(self, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """The first pass: gradients of rows on their direct way, of what they collect, answers."""
        answers, out = self.answers.detach(), self.layer.out
        direct = None if self.alone else torch.empty_like(self.x)
        at_values = torch.empty_like(self.x)
        to_answers = torch.zeros_like(answers, dtype=self.mass.dtype)
        for i, (_, rows) in enumerate(self.tiles):
            tile, g = self.x[:, rows], grad[:, rows]
            w = self._weights(i, tile, rows)
            gathered = collected(w, answers)
            if direct is not None:
                direct[:, rows], g = self._after(tile, out(gathered), g)
            self.sums["out"].add(_of_linear(g, gathered))
            back = at_values[:, rows]
            for to, one in zip(back, g, strict=True):
                torch.mm(one, out.tensors[0], out=to)
            to_answers += torch.matmul(w.transpose(-1, -2), by_heads(back, w.shape[1]))
        return direct, at_values, to_answers

    def _weights(self, i: int, tile: Tensor, rows: slice) -> Tensor:
        """Those of a tile; what they are made of is kept for the second pass."""
        if self.kept:
            return self.kept[i]
        assert self.middle is not None
        m = self.layer.made_of(tile, self.middle[:, rows])
        return self.layer.weights(m, rows)

    def _after(self, tile: Tensor, answer: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Back through what follows the attention: gradients of rows and of answers."""
        leaves, after = [leaf(tile), leaf(answer)], self.layer.after
        with torch.enable_grad():
            h, u = after(*leaves)
        self.sums["end"].add(_of_linear(g, u.detach()))
        gu = g @ self.layer.end.tensors[0]
        outs, grads = ([u], [gu]) if h is None else ([u, h], [gu, g])
        gx, ga, *found = vjp(outs, [*leaves, *after.tensors], grads)
        self.sums["after"].add(found)
        assert gx is not None
        assert ga is not None
        return gx, ga

    def _to_input(
        self, direct: Tensor | None, at_values: Tensor, to_sums: Tensor, to_mass: Tensor
    ) -> Tensor:
        """The second pass: gradients of the rows."""
        gS, gd = to_sums.to(self.x.dtype), to_mass.to(self.x.dtype)
        both = torch.cat([gS, self.answers.detach()], -1).transpose(-1, -2).flatten(0, 1)
        gd = gd.flatten(0, 1)[:, None]  # (B * H, 1, G) beside (B * H, 2D, G)
        gx = at_values if direct is None else direct
        for _, rows in self.tiles:
            x = leaf(self.x[:, rows])
            with torch.enable_grad():
                z = self.layer.norm(x)
                m = self.layer.into(z) if self.middle is None else self.middle[:, rows]
                ends = [leaf(z), leaf(m)]
                w, f = self.layer.slices(*ends, rows, True)
            back = by_heads(at_values[:, rows], w.shape[1])
            pairs = torch.cat([f.detach(), back], -1).flatten(0, 1)
            gw = torch.baddbmm(gd, pairs, both).view_as(w)
            gf = torch.matmul(w.detach(), gS)
            gz, gm, *found = vjp([w, f], [*ends, *self.layer.slices.tensors], [gw, gf])
            self.sums["slices"].add(found)
            assert gm is not None
            here = self._before(x, z, gz, gm)
            gx[:, rows] = here if direct is None else here + direct[:, rows]
        return gx

    def _before(self, x: Tensor, z: Tensor, gz: Tensor | None, gm: Tensor) -> Tensor:
        """Back through what is before the slices: the gradient of rows."""
        self.sums["into"].add(_of_linear(gm, z.detach()))
        through = gm @ self.layer.into.tensors[0].detach()
        gz = through if gz is None else through.add_(gz)
        gx, *found = vjp([z], [x, *self.layer.norm.tensors], [gz])
        self.sums["norm"].add(found)
        assert gx is not None
        return gx


class Gradients:
    """Sums of gradients over tiles, in float32 at least; None where none is wanted."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.sums: list[Tensor | None] = [None] * len(tensors)

    def add(self, found: Found) -> None:
        """Those of one more tile."""
        for i, (grad, t) in enumerate(zip(found, self.tensors, strict=True)):
            if grad is None or not t.requires_grad:
                continue
            have = self.sums[i]
            self.sums[i] = grad.to(wide(grad.dtype), copy=True) if have is None else have.add_(grad)

    def result(self) -> list[Tensor | None]:
        """In the types of the tensors."""
        pairs = zip(self.sums, self.tensors, strict=True)
        return [None if grad is None else grad.to(t.dtype) for grad, t in pairs]


def vjp(
    outs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor], **options: bool
) -> list[Tensor | None]:
    """Gradients of those inputs that want one."""
    wanted = [t for t in inputs if t.requires_grad]
    found = iter(torch.autograd.grad(outs, wanted, grads, allow_unused=True, **options))
    return [next(found) if t.requires_grad else None for t in inputs]


def _of_linear(grad: Tensor, x: Tensor) -> list[Tensor | None]:
    """Gradients of weight and bias of a linear layer."""
    flat = grad.flatten(0, 1)
    return [flat.T @ x.flatten(0, 1), flat.sum(0)]


def leaf(x: Tensor) -> Tensor:
    """The same rows, from which differentiation starts."""
    return x.detach().requires_grad_()
