"""Unmodified transformers of torch on sharded rows: values and gradients equal serial ones."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from test_attention import (
    SIZES,
    TOLERANCE,
    M,
    N,
    draw,
    far,
    global_grad,
    leaf,
    made,
    run,
    small_blocks,
    weighted,
    whole,
)  # fmt: skip
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from meshshard.comm import init_domain
from meshshard.tensor import NoShardRule, shard

pytestmark = pytest.mark.slow


def attention(**options):
    return lambda: nn.MultiheadAttention(8, 2, **{"batch_first": True} | options)


def layer(kind=nn.TransformerEncoderLayer, **options):
    return lambda: kind(8, 2, 16, **{"batch_first": True, "dropout": 0.0} | options)


def upper(n):
    return nn.Transformer.generate_square_subsequent_mask(n, dtype=torch.float64)


class PointTransformer(nn.Module):
    """A position encoding, pre-norm blocks, an output for each point and a global number."""

    def __init__(self):
        super().__init__()
        self.code = nn.Linear(3, 8)
        self.first = nn.Linear(8, 8)
        one_layer = nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.blocks = nn.TransformerEncoder(one_layer, 2, nn.LayerNorm(8), False)
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        pos = x[:, :3]
        pos = pos - pos.mean(0)
        x = self.first(x) + torch.sin(self.code(pos))
        x = self.blocks(x[None])[0]
        return self.last(x) + x.amax(0).sum()


class Fused(nn.Module):
    """Attention as in vision libraries: one product for q, k and v, heads by reshape, SDPA."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).reshape(b, n, c))


MODULES = {
    "fused": (Fused, lambda m, x, y, t: m(x[None])),
    "self": (attention(), lambda m, x, y, t: m(x[None], x[None], x[None], need_weights=False)[0]),
    "by default": (attention(), lambda m, x, y, t: m(x[None], x[None], x[None])[0]),
    "rows first": (
        attention(batch_first=False),
        lambda m, x, y, t: m(x[:, None], x[:, None], x[:, None], need_weights=False)[0],
    ),
    "unbatched": (attention(), lambda m, x, y, t: m(x, x, x, need_weights=False)[0]),
    "weights": (attention(), lambda m, x, y, t: m(x[None], y[None], y[None])[1]),
    "weights of heads": (
        attention(bias=False),
        lambda m, x, y, t: m(x, y, y, average_attn_weights=False)[1],
    ),
    "weights of tokens": (attention(), lambda m, x, y, t: m(t[None], x[None], x[None])[1]),
    "weights of points": (attention(), lambda m, x, y, t: m(x[None], t[None], t[None])[1]),
    "cross": (attention(), lambda m, x, y, t: m(x, y, y, need_weights=False)[0]),
    "other widths": (
        attention(kdim=4, vdim=3),
        lambda m, x, y, t: m(x, y[:, :4], y[:, 4:7], need_weights=False)[0],
    ),
    "causal": (
        attention(),
        lambda m, x, y, t: m(x, x, x, need_weights=False, attn_mask=upper(N), is_causal=True)[0],
    ),
    "causal by mask": (attention(), lambda m, x, y, t: m(x, x, x, attn_mask=upper(N))[0]),
    "padding": (
        attention(),
        lambda m, x, y, t: m(x, y, y, (torch.arange(M) % 3 == 1), need_weights=False)[0],
    ),
    "padding of data": (
        attention(),
        lambda m, x, y, t: m(x[None], y[None], y[None], (y[:, 0] > 0)[None], False)[0],
    ),
    "both masks": (
        attention(),
        lambda m, x, y, t: m(x, y, y, draw(M), attn_mask=draw(2, N, M))[0],
    ),
    "tokens to points": (attention(), lambda m, x, y, t: m(t[None], x[None], x[None])[0]),
    "points to tokens": (attention(), lambda m, x, y, t: m(x, t, t, need_weights=False)[0]),
    "perceiver": (
        lambda: nn.ModuleList([attention()(), attention()(), nn.LayerNorm(8)]),
        lambda m, x, y, t: m[1](x, *[m[2](m[0](t, x, x, need_weights=False)[0])] * 2)[0],
    ),
    "samples": (
        lambda: nn.MultiheadAttention(2, 1, batch_first=True),
        lambda m, x, y, t: m(*[x.unflatten(1, (4, 2))] * 3, need_weights=False)[0],
    ),
    "weights of samples": (
        lambda: nn.MultiheadAttention(2, 1, batch_first=True),
        lambda m, x, y, t: m(*[x.unflatten(1, (4, 2))] * 3)[1],
    ),
    "encoder layer": (layer(), lambda m, x, y, t: m(x[None])),
    "encoder layer, norm first": (
        layer(batch_first=False, norm_first=True),
        lambda m, x, y, t: m(x[:, None]),
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(layer()(), 2, nn.LayerNorm(8)),
        lambda m, x, y, t: m(x[None]),
    ),
    "causal encoder": (
        lambda: nn.TransformerEncoder(layer()(), 2),
        lambda m, x, y, t: m(x[None], mask=upper(N), is_causal=True),
    ),
    "padded encoder": (  # in eval() torch asks whether it may make nested tensors of the mask
        lambda: nn.TransformerEncoder(layer()(), 2),
        lambda m, x, y, t: m(x[None], src_key_padding_mask=(torch.arange(N) >= N - 2)[None]),
    ),
    "decoder layer": (
        layer(nn.TransformerDecoderLayer),
        lambda m, x, y, t: m(x[None], y[None], tgt_mask=upper(N), tgt_is_causal=True),
    ),
    "decoder of tokens": (
        lambda: nn.TransformerDecoder(layer(nn.TransformerDecoderLayer)(), 2),
        lambda m, x, y, t: m(t[None], x[None]),
    ),
    "nn.Transformer": (
        lambda: nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True),
        lambda m, x, y, t: m(y[None], x[None]),
    ),
    "point transformer": (PointTransformer, lambda m, x, y, t: m(x)),
}


def modules_job(name, sizes, train):
    domain = init_domain()
    make, forward = MODULES[name]
    x, y, tokens = draw(N, 8), draw(M, 8, seed=1), draw(3, 8, seed=2)
    model = made(make).train(train)
    leaves = [t.requires_grad_() for t in (x, y, tokens)]
    out = forward(model, *leaves)
    coefficients = draw(*out.shape, seed=7)
    parameters = list(model.parameters())
    wanted = torch.autograd.grad((out * coefficients).sum(), leaves + parameters, allow_unused=True)
    twin = made(make).train(train)
    mine = [leaf(domain, x, sizes[0], True, 0), leaf(domain, y, sizes[1], True, 0)]
    mine.append(leaf(domain, tokens, (), False))
    with small_blocks():
        got = forward(twin, *mine)
        weighted(got, coefficients, domain).backward()
    assert got.shape == out.shape
    domain.average_gradients(twin)
    found = [global_grad(domain, t) for t in mine] + [p.grad for p in twin.parameters()]
    errors = {"output": far(whole(got), out.detach())}
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        a, b = (torch.zeros(()).double() if g is None else g for g in (a, b))
        errors[i] = far(a, b)
    return errors


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MODULES)
def test_layers_of_torch(ranks, name, size):
    for sizes in SIZES[size]:
        for train in (True, False):
            for errors in run(ranks, size, modules_job, name, sizes, train):
                assert max(errors.values()) <= TOLERANCE, (sizes, train, errors)


def around_job(kind):
    """Attention under DDP, in a checkpoint and under autocast."""
    domain = init_domain()
    dtype = torch.float32 if kind == "autocast" else torch.float64
    x = draw(1, N, 8).to(dtype)
    plain, mine = (made(layer()).to(dtype) for _ in range(2))
    sx = shard(x, domain, SIZES[2][0][0], dim=1).requires_grad_()
    x.requires_grad_()
    if kind == "ddp":
        mine = DistributedDataParallel(mine)
    cast = torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast")
    with cast:
        outs = [
            checkpoint(m, t, use_reentrant=False) if kind == "checkpoint" else m(t)
            for m, t in ((plain, x), (mine, sx))
        ]
    for out in outs:
        out.to(dtype).square().mean().backward()
    if kind != "ddp":
        domain.average_gradients(mine)
    pairs = zip(mine.parameters(), plain.parameters(), strict=True)
    errors = [
        far(whole(outs[1]).to(dtype), outs[0].detach().to(dtype)),
        far(sx.grad.gather(), x.grad),
    ]
    assert outs[1].dtype == outs[0].dtype
    return errors + [far(p.grad, q.grad) for p, q in pairs]


@pytest.mark.parametrize("kind", ["ddp", "checkpoint", "autocast"])
def test_under_ddp_checkpoint_and_autocast(ranks, kind):
    for errors in ranks[2].run(around_job, kind):
        assert max(errors[:2]) <= (0.02 if kind == "autocast" else TOLERANCE), errors
        assert max(errors[2:]) <= (0.2 if kind == "autocast" else TOLERANCE), errors


class ViT(nn.Module):
    """A vision transformer: patches, a class token, positions, blocks, a head on the token."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(1, 8, 2, stride=2)
        self.cls = nn.Parameter(torch.randn(1, 1, 8))
        self.pos = nn.Parameter(torch.randn(1, 7 * 3 + 1, 8))
        one_layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(one_layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, picture):
        x = self.patch(picture).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos
        x = self.blocks(x)
        return self.head(x[:, 0]).square().sum() + x[:, 1:].square().mean()


def vit_job(sizes):
    """Three training steps on an image that is sharded by rows."""
    domain = init_domain()
    picture = draw(2, 1, 14, 6)
    errors = {}
    models = made(ViT), made(ViT)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    mine = shard(picture, domain, sizes, dim=2)
    for step in range(3):
        losses = [m(x) for m, x in zip(models, (picture, mine), strict=True)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        domain.average_gradients(models[1])
        errors["loss", step] = far(losses[1].detach(), losses[0].detach())
        for (name, p), q in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
            errors[name, step] = far(p.grad, q.grad)
        for optimizer in optimizers:
            optimizer.step()
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(14,), (4, 10), (14, 0), (0, 6, 2, 6)])
def test_a_vision_transformer(ranks, sizes):
    for errors in run(ranks, len(sizes), vit_job, sizes):
        assert max(errors.values()) <= TOLERANCE, errors


def uneven_patches_job():
    domain = init_domain()
    with pytest.raises(NoShardRule, match="multiples of it"):
        made(ViT)(shard(draw(2, 1, 14, 6), domain, (3, 11), dim=2))


def test_patches_across_two_ranks_are_refused(ranks):
    ranks[2].run(uneven_patches_job)


def inference_job(name, mode):
    """Without gradients, torch uses its fast path on whole tensors; results must equal those."""
    domain = init_domain()
    make, forward = MODULES[name]
    model = made(make).eval()
    x, y, tokens = draw(N, 8), draw(M, 8, seed=1), draw(3, 8, seed=2)
    with mode():
        out = forward(model, x, y, tokens)
        sizes = SIZES[2][0]
        got = forward(model, shard(x, domain, sizes[0]), shard(y, domain, sizes[1]), tokens)
        return far(got.gather(), out)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["self", "by default", "encoder", "causal encoder"])
def test_inference_equals_the_fast_path(ranks, name, mode):
    assert max(ranks[2].run(inference_job, name, mode)) <= TOLERANCE
