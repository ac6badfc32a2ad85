"""The gradient of a layer of slice attention, tile by tile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshshard.nn._slices import Layer, Run, collected, means, only_answer, wide

__all__ = ["Backward", "Gradients", "leaf", "vjp"]

Found = Sequence[Tensor | None]


class Backward:
    """Two passes back over the rows of one layer, around its stage of tokens."""

    def __init__(
        self, layer: Layer, run: Run, x: Tensor, total: Tensor, kept: list[Tensor] | None
    ) -> None:
        self.x, self.run, self.kept, self.tiles = x, run, kept, run.tiles()
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in layer.tensors]
        self.layer = layer.on(leaves)
        self.mass = (total[..., -1] + layer.eps)[..., None]
        self.means = means(total, layer.eps, x.dtype).requires_grad_()
        with torch.enable_grad():
            self.answers = self.layer.tokens(self.means)
        self.sums = [Gradients(piece.tensors) for piece in self.layer.pieces]

    def gradients(self, grad: Tensor) -> Found:
        """Those of the rows and of all tensors."""
        of_slices, of_tokens, of_out, of_after = self.sums
        direct, at_values, to_answers = self._from_output(grad, of_out, of_after)
        tensors = self.layer.tokens.tensors
        found = vjp([self.answers], [self.means, *tensors], [to_answers])
        of_tokens.add(found[1:])
        assert found[0] is not None
        to_means = self.run.domain.all_reduce(found[0].to(self.mass.dtype))
        to_sums = to_means / self.mass
        to_mass = -(to_sums * self.means).sum(-1)
        gx = self._to_input(direct, at_values, (to_sums, to_mass), of_slices)
        return [gx, *(t for sums in self.sums for t in sums.result())]

    def _from_output(
        self, grad: Tensor, of_out: Gradients, of_after: Gradients
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """The first pass: gradients of rows on their direct way, of what they collect, answers."""
        answers, out, after = self.answers.detach(), self.layer.out, self.layer.after
        weight = out.tensors[0]
        direct = None if after.function is only_answer else torch.empty_like(self.x)
        at_values = self.x.new_empty((*self.x.shape[:2], weight.shape[1]))
        to_answers = torch.zeros_like(answers, dtype=self.mass.dtype)
        for i, (_, rows) in enumerate(self.tiles):
            tile, g = self.x[:, rows], grad[:, rows]
            w = self.kept[i] if self.kept else self.layer.weights(tile, rows)
            gathered = collected(w, answers)
            if direct is not None:
                leaves = [leaf(tile), leaf(out(gathered))]
                with torch.enable_grad():
                    y = after(*leaves)
                found = vjp([y], [*leaves, *after.tensors], [g])
                gx, g = (t for t in found[:2] if t is not None)
                of_after.add(found[2:])
                direct[:, rows] = gx
            flat = g.flatten(0, 1)
            of_out.add([flat.T @ gathered.flatten(0, 1), flat.sum(0)])
            back = at_values[:, rows] = g @ weight
            heads = back.view(*back.shape[:2], *answers.shape[1::2]).permute(0, 2, 1, 3)
            to_answers += torch.matmul(w.permute(0, 2, 3, 1), heads)
        return direct, at_values, to_answers

    def _to_input(
        self,
        direct: Tensor | None,
        at_values: Tensor,
        to_sums: tuple[Tensor, Tensor],
        of_slices: Gradients,
    ) -> Tensor:
        """The second pass: gradients of the rows."""
        slices, dtype = self.layer.slices, self.x.dtype
        gS, gd = (g.to(dtype) for g in to_sums)
        both = torch.cat([gS, self.answers.detach()], -1).transpose(-1, -2).flatten(0, 1)
        gd = gd.flatten(0, 1)[:, None]  # (B * H, 1, G) beside (B * H, 2D, G)
        gx = at_values if direct is None else direct
        for _, rows in self.tiles:
            tile = leaf(self.x[:, rows])
            with torch.enable_grad():
                w, f, _ = self.layer.sliced(tile, rows)
            back = at_values[:, rows].reshape(f.shape)
            pairs = torch.cat([f.detach(), back], -1).permute(0, 2, 1, 3).flatten(0, 1)
            gw = torch.baddbmm(gd, pairs, both).view(*gS.shape[:2], *w.shape[1::2]).transpose(1, 2)
            gf = torch.matmul(w.detach().permute(0, 2, 1, 3), gS).permute(0, 2, 1, 3)
            found = vjp([w, f], [tile, *slices.tensors], [gw, gf])
            of_slices.add(found[1:])
            here, own = found[0], None if direct is None else direct[:, rows]
            assert here is not None
            gx[:, rows] = here if own is None else here.add_(own)
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


def leaf(x: Tensor) -> Tensor:
    """The same rows, from which differentiation starts."""
    return x.detach().requires_grad_()
