"""Operations that models use: values and gradients are compared with those on the whole tensor.

A case is a function of x (N, 6), y (N, 6), w (6, 6), c (6,), labels n (N,) in 0..5; x, y and n are
sharded by rows, w and c are plain.
"""

import warnings

import einops
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

POINTWISE = {
    "add": lambda x, y, w, c, n: x + y,
    "add number": lambda x, y, w, c, n: 2 + x * 3 - 1,
    "add plain column": lambda x, y, w, c, n: x * c + c,
    "sub": lambda x, y, w, c, n: 1 - x,
    "div": lambda x, y, w, c, n: x / (y * y + 1),
    "rdiv": lambda x, y, w, c, n: 1 / (x * x + 1),
    "pow": lambda x, y, w, c, n: (x * x + 1) ** 1.5,
    "rpow": lambda x, y, w, c, n: 2**x,
    "exp log": lambda x, y, w, c, n: torch.log(torch.exp(x) + 1),
    "relu": lambda x, y, w, c, n: F.relu(x),
    "gelu": lambda x, y, w, c, n: F.gelu(x),
    "silu": lambda x, y, w, c, n: F.silu(x),
    "leaky_relu": lambda x, y, w, c, n: F.leaky_relu(x, 0.1),
    "elu": lambda x, y, w, c, n: F.elu(x),
    "glu": lambda x, y, w, c, n: F.glu(x) * nn.GLU(1)(y),
    "softplus": lambda x, y, w, c, n: F.softplus(x),
    "tanh sigmoid": lambda x, y, w, c, n: torch.tanh(x) * torch.sigmoid(y),
    "clamp": lambda x, y, w, c, n: x.clamp(-0.5, 0.5),
    "where": lambda x, y, w, c, n: torch.where(x > 0, x, y * 0.1),
    "out": lambda x, y, w, c, n: (
        torch.add(x.detach(), y.detach(), out=torch.zeros_like(x.detach())) * x
    ),
    "where number": lambda x, y, w, c, n: torch.where(x > 0, x, 0.0),
    "maximum": lambda x, y, w, c, n: torch.maximum(x, y),
    "lerp": lambda x, y, w, c, n: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y, w, c, n: torch.addcmul(x, y, x, value=0.5),
    "in place": lambda x, y, w, c, n: (x * 1).add_(y).mul_(2).relu_(),
    "masked_fill": lambda x, y, w, c, n: x.masked_fill(y > 0, 0.0),
    "abs sqrt": lambda x, y, w, c, n: (x.abs() + 1).sqrt(),
    "to float32": lambda x, y, w, c, n: x.to(torch.float32).double(),
    "nan_to_num": lambda x, y, w, c, n: torch.nan_to_num(x),
    "atan2": lambda x, y, w, c, n: torch.atan2(x, y * y + 1),
    "clone detach": lambda x, y, w, c, n: x.clone() * y.detach(),
    "logical": lambda x, y, w, c, n: ((x > 0) & (y > 0) | ~(x < 1)).double() * x,
    "zeros_like": lambda x, y, w, c, n: x + torch.zeros_like(x) + torch.full_like(x, 2.0),
    "igamma": lambda x, y, w, c, n: torch.igamma(x.detach().abs() + 1, y * y + 1) * x,
    "special functions": lambda x, y, w, c, n: (
        x * torch.special.airy_ai(y.detach()) * torch.special.gammainc(c.detach() ** 2, y * y)
    ),
    "polynomials": lambda x, y, w, c, n: (
        x * torch.special.chebyshev_polynomial_t(y.detach().clamp(-1, 1), n[:, None])
    ),
    "shifts": lambda x, y, w, c, n: x * (n.__rlshift__(1) + (n << 2).__irshift__(1))[:, None],
    "new_zeros": lambda x, y, w, c, n: x + x.new_zeros(x.shape),
}
REDUCTIONS = {
    "sum": lambda x, y, w, c, n: (x * y).sum(),
    "sum rows": lambda x, y, w, c, n: x.square().sum(0),
    "sum rows keepdim": lambda x, y, w, c, n: x.square().sum(0, keepdim=True) * c,
    "sum features": lambda x, y, w, c, n: x.square().sum(-1),
    "mean": lambda x, y, w, c, n: x.square().mean(),
    "mean rows": lambda x, y, w, c, n: x.square().mean(0),
    "mean of both": lambda x, y, w, c, n: x.square().mean((0, 1)),
    "centered": lambda x, y, w, c, n: x - x.mean(0),
    "var": lambda x, y, w, c, n: x.var(0),
    "std biased": lambda x, y, w, c, n: x.std(0, unbiased=False),
    "var all": lambda x, y, w, c, n: torch.var(x),
    "var features": lambda x, y, w, c, n: x.var(-1),
    "var_mean": lambda x, y, w, c, n: torch.var_mean(x, 0)[0] + torch.var_mean(x, 0)[1],
    "amax": lambda x, y, w, c, n: x.amax(0),
    "amax ties": lambda x, y, w, c, n: F.relu(x - 10).amax(0) + F.relu(x).amin(0),
    "max": lambda x, y, w, c, n: x.max(),
    "max rows": lambda x, y, w, c, n: x.max(0).values,
    "max rows places": lambda x, y, w, c, n: x.max(0).indices.double() + x.sum(0),
    "min features": lambda x, y, w, c, n: x.min(1).values,
    "argmax": lambda x, y, w, c, n: x.argmax(0).double() * x.mean(0),
    "argmax all": lambda x, y, w, c, n: x.argmax().double() * x.mean(),
    "argmin features": lambda x, y, w, c, n: x.argmin(1).double() * x.sum(1),
    "norm": lambda x, y, w, c, n: x.norm(),
    "norm rows": lambda x, y, w, c, n: torch.linalg.vector_norm(x, dim=0),
    "norm 1": lambda x, y, w, c, n: x.norm(p=1, dim=0),
    "norm inf": lambda x, y, w, c, n: x.norm(p=float("inf"), dim=0),
    "norm 3": lambda x, y, w, c, n: torch.linalg.vector_norm(x, 3),
    "softmax rows": lambda x, y, w, c, n: x.softmax(0),
    "softmax rows large": lambda x, y, w, c, n: (x * 400).softmax(0),
    "softmax features": lambda x, y, w, c, n: F.softmax(x, -1),
    "log_softmax rows": lambda x, y, w, c, n: F.log_softmax(x * 50, 0),
    "logsumexp": lambda x, y, w, c, n: torch.logsumexp(x * 100, 0),
    "any all": lambda x, y, w, c, n: (x > 2).any(0).double() * x.sum(0) + (x > -9).all().double(),
    "count_nonzero": lambda x, y, w, c, n: (x > 0).count_nonzero(0) * x.sum(0),
    "cumsum features": lambda x, y, w, c, n: x.cumsum(1),
    "cumsum rows": lambda x, y, w, c, n: x.cumsum(0),
    "topk features": lambda x, y, w, c, n: x.topk(3, dim=1).values,
    "sort features": lambda x, y, w, c, n: x.sort(dim=-1).values,
    "nanmean": lambda x, y, w, c, n: torch.nanmean(torch.where(x > 1, float("nan"), x), 0),
}
PRODUCTS = {
    "cross": lambda x, y, w, c, n: torch.cross(x[:, :3], y[:, 3:], dim=1),
    "cross of no dim": lambda x, y, w, c, n: _cross(x[:, :3], y[:, 3:]),
    "cross plain": lambda x, y, w, c, n: (
        torch.linalg.cross(x[:, 3:], c[None, :3]) + x[:, :3].cross(y[:, :3], -1)
    ),
    "matrices": lambda x, y, w, c, n: (
        torch.linalg.inv(_matrices(x)).flatten(1) * torch.linalg.det(_matrices(y))[:, None]
    ),
    "eigenvalues": lambda x, y, w, c, n: (
        torch.linalg.eigvalsh(_matrices(x)) + torch.linalg.svdvals(_matrices(y))
    ),
    "linear": lambda x, y, w, c, n: F.linear(x, w, c),
    "matmul": lambda x, y, w, c, n: x @ w,
    "contracted": lambda x, y, w, c, n: x.T @ y,
    "plain from the left": lambda x, y, w, c, n: w @ x.T,
    "einsum rows kept": lambda x, y, w, c, n: torch.einsum("nc,cd->nd", x, w),
    "einsum contracted": lambda x, y, w, c, n: torch.einsum("nc,nd->cd", x, y),
    "einsum dots": lambda x, y, w, c, n: torch.einsum("...c,dc->...d", x, w),
    "bmm": lambda x, y, w, c, n: torch.bmm(x[:, :, None], y[:, None, :]),
    "mv": lambda x, y, w, c, n: torch.mv(x, c),
    "dot": lambda x, y, w, c, n: torch.dot(x[:, 0], y[:, 1]),
    "addmm": lambda x, y, w, c, n: torch.addmm(c, x, w),
    "features sharded": lambda x, y, w, c, n: F.linear(x.T.unsqueeze(0), y.T, None),
    "slice tokens": lambda x, y, w, c, n: (
        torch.einsum("ng,nc->gc", (x @ w).softmax(-1), y)
        / (1 + (x @ w).softmax(-1).sum(0))[:, None]
    ),
}  # fmt: skip
VIEWS = {
    "reshape heads": lambda x, y, w, c, n: x.reshape(-1, 2, 3),
    "view": lambda x, y, w, c, n: x.view(x.shape[0], 3, 2).sum(-1),
    "flatten rows": lambda x, y, w, c, n: x.flatten(),
    "flatten and back": lambda x, y, w, c, n: x.reshape(-1).reshape(-1, 6),
    "transpose": lambda x, y, w, c, n: x.transpose(0, 1) * c[:, None],
    "permute": lambda x, y, w, c, n: x.reshape(-1, 2, 3).permute(1, 0, 2),
    "T": lambda x, y, w, c, n: x.T,
    "unsqueeze squeeze": lambda x, y, w, c, n: (x[None] * 2).squeeze(0).unsqueeze(-1),
    "expand": lambda x, y, w, c, n: x.unsqueeze(1).expand(-1, 4, -1),
    "cat features": lambda x, y, w, c, n: torch.cat([x, y], dim=-1),
    "cat rows": lambda x, y, w, c, n: torch.cat([x, y, x]),
    "cat plain rows": lambda x, y, w, c, n: torch.cat([c[None], x, w, y, w[:2]]) ** 2,
    "stack": lambda x, y, w, c, n: torch.stack([x, y], dim=1),
    "stack in front": lambda x, y, w, c, n: torch.stack([x, y]),
    "split features": lambda x, y, w, c, n: x.split(2, dim=1)[1],
    "chunk": lambda x, y, w, c, n: x.chunk(3, dim=-1)[2],
    "chunk rows": lambda x, y, w, c, n: x.chunk(3)[1],
    "unbind features": lambda x, y, w, c, n: x.unbind(1)[4],
    "flip features": lambda x, y, w, c, n: x.flip(1),
    "roll features": lambda x, y, w, c, n: x.roll(2, 1),
    "repeat features": lambda x, y, w, c, n: x.repeat(1, 3),
    "pad features": lambda x, y, w, c, n: F.pad(x, (1, 2)),
    "movedim": lambda x, y, w, c, n: x.movedim(0, 1),
    "unflatten": lambda x, y, w, c, n: x.unflatten(1, (3, 2)),
    "flip rows": lambda x, y, w, c, n: x.flip(0) * y,
    "roll rows": lambda x, y, w, c, n: x.roll(5, 0) * y,
    "pad rows": lambda x, y, w, c, n: F.pad(x.T[None], (2, 3), "circular"),
    "flatten columns": lambda x, y, w, c, n: x.T.flatten() ** 2,
    "merged with columns": lambda x, y, w, c, n: x.T.reshape(3, -1),
    "windows of rows": lambda x, y, w, c, n: x.unfold(0, 4, 3),
    "diagonal": lambda x, y, w, c, n: torch.diagonal_scatter(x, y.diagonal()),
    "differences of rows": lambda x, y, w, c, n: torch.gradient(x, dim=0)[0] + x[1:2].squeeze(),
    "products of rows": lambda x, y, w, c, n: x.cumprod(0) * y.prod(0),
    "largest so far": lambda x, y, w, c, n: x.cummax(0).values * y.cummin(0).indices,
    "cross of three rows": lambda x, y, w, c, n: torch.linalg.cross(x[:3], y[:3], dim=0),
    "set elements": lambda x, y, w, c, n: x.masked_scatter(x > 0.5, y.flatten()),
}
EINOPS = {
    "einops heads": lambda x, y, w, c, n: einops.rearrange(x, "n (h c) -> h n c", h=2),
    "einops and back": lambda x, y, w, c, n: einops.rearrange(
        einops.rearrange(x, "n (h c) -> 1 h n c", h=2) * 2, "1 h n c -> n (h c)"
    ),
    "einops join": lambda x, y, w, c, n: einops.rearrange(x, "n c -> (n c)"),
    "einops list": lambda x, y, w, c, n: einops.rearrange([x, y], "b n c -> n b c"),
    "einops mean of rows": lambda x, y, w, c, n: einops.reduce(x * x, "n c -> c", "mean"),
    "einops sum": lambda x, y, w, c, n: einops.reduce(x, "n (h c) -> n h", "sum", h=3),
    "einops max": lambda x, y, w, c, n: einops.reduce(x, "n c -> 1 c", "max"),
    "einops repeat": lambda x, y, w, c, n: einops.repeat(x, "n c -> b n k c", b=2, k=3),
    "einops repeat rows": lambda x, y, w, c, n: einops.repeat(x, "n c -> (n 2) c"),
    "einops einsum": lambda x, y, w, c, n: einops.einsum(x, y, "n c, n d -> c d"),
    "einops pack": lambda x, y, w, c, n: einops.pack([x, y.reshape(-1, 2, 3)], "n *")[0],
    "einops unpack": lambda x, y, w, c, n: einops.unpack(x, [[2], [2, 2]], "n *")[1],
}
INDEXING = {
    "column": lambda x, y, w, c, n: x[:, 2],
    "columns": lambda x, y, w, c, n: x[:, 1:4],
    "new dim": lambda x, y, w, c, n: x[:, None, :],
    "columns by number": lambda x, y, w, c, n: x[:, [0, 3]],
    "rows": lambda x, y, w, c, n: x[3:11],
    "every third row": lambda x, y, w, c, n: x[2::3, :2],
    "one row": lambda x, y, w, c, n: x[4] * c,
    "last row": lambda x, y, w, c, n: x[-1],
    "mask of rows": lambda x, y, w, c, n: x[y[:, 0] > 0],
    "mask of numbers": lambda x, y, w, c, n: x[x > 0],
    "rows by number": lambda x, y, w, c, n: x[torch.tensor([7, 0, 7, 12])],
    "index_select features": lambda x, y, w, c, n: x.index_select(1, torch.tensor([5, 0])),
    "narrow rows": lambda x, y, w, c, n: x.narrow(0, 2, 9),
    "gather features": lambda x, y, w, c, n: torch.gather(x, 1, n[:, None]),
    "scatter_add features": lambda x, y, w, c, n: torch.zeros_like(x).scatter_add(
        1, n[:, None].expand(-1, 2), x[:, :2]
    ),
    "set column": lambda x, y, w, c, n: _set(x, (slice(None), 1), y[:, 0]),
    "set rows": lambda x, y, w, c, n: _set(x, slice(2, 9), 1.5),
    "set picked rows": lambda x, y, w, c, n: _set(x, n > 2, (x * y)[n > 2]),
    "set picked numbers": lambda x, y, w, c, n: _set(x, (n > 2, 1), y[n > 2][:, 0]),
    "set picked of one column": lambda x, y, w, c, n: _set(
        x[:, 0], y[:, 1] > 0, y[y[:, 1] > 0][:, 2]
    ),
    "set mask": lambda x, y, w, c, n: _set(x, y > 0, 0.0),
    "embedding": lambda x, y, w, c, n: F.embedding(n, w) * x,
    "one_hot": lambda x, y, w, c, n: F.one_hot(n, 6) * x,
}
ATTENTION = {
    "attention": lambda x, y, w, c, n: F.scaled_dot_product_attention(x[None], y[None], y[None]),
    "attention to plain keys": lambda x, y, w, c, n: F.scaled_dot_product_attention(x, w, w),
    "attention of plain queries": lambda x, y, w, c, n: F.scaled_dot_product_attention(w, x, y),
    "attention by features": lambda x, y, w, c, n: F.scaled_dot_product_attention(
        *[x.view(x.shape[0], 3, 2)] * 2, y.view(x.shape[0], 3, 2)
    ),
}
NORMS = {
    "layer_norm": lambda x, y, w, c, n: F.layer_norm(x, (6,), c, c),
    "layer_norm of rows": lambda x, y, w, c, n: F.layer_norm(x.T, (x.shape[0],)),
    "rms_norm": lambda x, y, w, c, n: F.rms_norm(x, (6,), c),
    "batch_norm": lambda x, y, w, c, n: F.batch_norm(x, None, None, c, c, training=True),
    "batch_norm points": lambda x, y, w, c, n: F.batch_norm(x.T[None], None, None, c, c, True),
    "batch_norm eval": lambda x, y, w, c, n: F.batch_norm(x, c.detach(), c.detach() ** 2, c, c),
    "instance_norm": lambda x, y, w, c, n: F.instance_norm(x.T[None]),
    "group_norm": lambda x, y, w, c, n: F.group_norm(x, 2, c, c),
    "group_norm points": lambda x, y, w, c, n: F.group_norm(x.T[None], 3, c, c),
    "normalize": lambda x, y, w, c, n: F.normalize(x, dim=-1),
    "normalize rows": lambda x, y, w, c, n: F.normalize(x, dim=0),
    "cosine_similarity": lambda x, y, w, c, n: F.cosine_similarity(x, y, dim=-1),
}
LOSSES = {
    "mse": lambda x, y, w, c, n: F.mse_loss(x, y),
    "mse sum": lambda x, y, w, c, n: F.mse_loss(x, y, reduction="sum"),
    "l1": lambda x, y, w, c, n: F.l1_loss(x, y),
    "huber": lambda x, y, w, c, n: F.huber_loss(x, y, delta=0.3),
    "smooth_l1 none": lambda x, y, w, c, n: F.smooth_l1_loss(x, y, reduction="none"),
    "bce logits": lambda x, y, w, c, n: F.binary_cross_entropy_with_logits(x, torch.sigmoid(y)),
    "bce": lambda x, y, w, c, n: F.binary_cross_entropy(torch.sigmoid(x), (y > 0).double()),
    "kl_div": lambda x, y, w, c, n: F.kl_div(
        x.log_softmax(-1), y.softmax(-1), reduction="batchmean"
    ),
    "cross_entropy": lambda x, y, w, c, n: F.cross_entropy(x, n),
    "cross_entropy weights": lambda x, y, w, c, n: F.cross_entropy(
        x, n, weight=c.detach().abs() + 0.1, ignore_index=2, label_smoothing=0.1
    ),
    "cross_entropy soft": lambda x, y, w, c, n: F.cross_entropy(x, y.softmax(-1)),
    "nll": lambda x, y, w, c, n: F.nll_loss(x.log_softmax(-1), n),
    "gaussian_nll": lambda x, y, w, c, n: F.gaussian_nll_loss(x, y.detach(), y * y + 0.1),
    "cosine_embedding": lambda x, y, w, c, n: F.cosine_embedding_loss(x, y, 2 * (n % 2) - 1),
    "relative L2": lambda x, y, w, c, n: (x - y).norm() / y.norm(),
}
LAYERS = {
    "nn.Sequential": lambda x, y, w, c, n: _layer(
        x, lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 6))
    ),
    "nn.PReLU": lambda x, y, w, c, n: _layer(x, nn.PReLU),
    "nn.LayerNorm": lambda x, y, w, c, n: _layer(x, lambda: nn.LayerNorm(6)),
    "nn.RMSNorm": lambda x, y, w, c, n: _layer(x, lambda: nn.RMSNorm(6)),
    "nn.BatchNorm1d": lambda x, y, w, c, n: _layer(x, lambda: nn.BatchNorm1d(6)),
    "nn.BatchNorm1d eval": lambda x, y, w, c, n: _layer(x, lambda: nn.BatchNorm1d(6).eval()),
    "nn.GroupNorm": lambda x, y, w, c, n: _layer(x, lambda: nn.GroupNorm(3, 6)),
    "nn.InstanceNorm1d": lambda x, y, w, c, n: _layer(x.T[None], lambda: nn.InstanceNorm1d(6)),
    "nn.Conv1d": lambda x, y, w, c, n: _layer(x.T[None], lambda: nn.Conv1d(6, 4, 3, padding=1)),
    "nn.Embedding": lambda x, y, w, c, n: _layer(n, lambda: nn.Embedding(6, 6)) * x,
    "nn.Dropout eval": lambda x, y, w, c, n: _layer(x, lambda: nn.Dropout(0.5).eval()),
    "nn.Flatten": lambda x, y, w, c, n: _layer(x.reshape(-1, 2, 3), nn.Flatten),
    "nn.MultiheadAttention": lambda x, y, w, c, n: _attention(x, y),
    "nn.TransformerEncoderLayer": lambda x, y, w, c, n: _layer(
        x, lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0)
    ),
    "nn.LSTM of steps": lambda x, y, w, c, n: _layer(
        torch.stack([x, y, x * y], 1), lambda: nn.LSTM(6, 4, 2, batch_first=True, proj_size=3)
    )[0],
    "nn.GRU state": lambda x, y, w, c, n: _layer(
        torch.stack([x, y]), lambda: nn.GRU(6, 4, bidirectional=True)
    )[1],
    "nn.RNN state of state": lambda x, y, w, c, n: _layer(
        torch.stack([x, y]), lambda: _Twice(nn.RNN(6, 4, nonlinearity="relu"))
    ),
    "nn.GRUCell": lambda x, y, w, c, n: _layer(x, lambda: _Twice(nn.GRUCell(6, 4))),
    "nn.RNNCell state": lambda x, y, w, c, n: _layer(
        x, lambda: nn.RNNCell(6, 6, nonlinearity="relu"), y
    ),
    "nn.LSTMCell plain state": lambda x, y, w, c, n: _layer(
        x, lambda: nn.LSTMCell(6, 6), (y, c.expand(len(y), 6))
    )[1],
    "nn.CrossEntropyLoss": lambda x, y, w, c, n: nn.CrossEntropyLoss()(x, n),
    "nn.MSELoss": lambda x, y, w, c, n: nn.MSELoss()(x, y),
    "nn.SmoothL1Loss": lambda x, y, w, c, n: nn.SmoothL1Loss()(x, y),
}
REFUSED = {  # operations that couple all rows and have no rule
    "inverse of all": lambda x, y, w, c, n: torch.linalg.inv(x[:6]),
    "all pairs": lambda x, y, w, c, n: x @ y.T,
    "nn.GRU": lambda x, y, w, c, n: _layer(x, lambda: nn.GRU(6, 6))[0],
    "nn.LSTM along rows": lambda x, y, w, c, n: _layer(
        torch.stack([x, y]), lambda: nn.LSTM(6, 6, batch_first=True)
    )[0],
    "nn.GRUCell of a column": lambda x, y, w, c, n: _layer(x[:, 0], lambda: nn.GRUCell(14, 6)),
    "nn.GRUCell state of few": lambda x, y, w, c, n: _layer(
        x, lambda: nn.GRUCell(6, 6), x[:3].gather()
    ),
    "nn.LSTM dropout": lambda x, y, w, c, n: _layer(
        torch.stack([x, y]), lambda: nn.LSTM(6, 6, 2, dropout=0.5)
    )[0],
}
FAMILIES = {
    "pointwise": POINTWISE,
    "reductions": REDUCTIONS,
    "products": PRODUCTS,
    "views": VIEWS,
    "einops": EINOPS,
    "indexing": INDEXING,
    "attention": ATTENTION,
    "norms": NORMS,
    "losses": LOSSES,
    "layers": LAYERS,
}
CASES = {name: case for family in FAMILIES.values() for name, case in family.items()}


def _matrices(x):
    """Symmetric 2 x 2 matrices with distinct eigenvalues."""
    return torch.stack([x[:, 0].exp() + 3, x[:, 1].sin(), x[:, 1].sin(), x[:, 2].cos()], 1).reshape(
        -1, 2, 2
    )


def _cross(x, y):
    """torch.cross without a dim, which warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cross(x, y)


def _set(x, index, value):
    out = x * 1
    out[index] = value
    return out


def _layer(x, make, *given):
    """The output of a layer that has the same parameters on every rank."""
    torch.manual_seed(5)
    return make().double()(x, *given)


class _Twice(nn.Module):
    """A recurrent layer that is applied twice, the second time from its last state."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        if isinstance(self.layer, nn.RNNCellBase):
            return self.layer(x, self.layer(x))
        return self.layer(x, self.layer(x)[1])[0]


def _attention(x, y):
    torch.manual_seed(5)
    return nn.MultiheadAttention(6, 2, batch_first=True).double()(x[None], y[None], y[None])[0]
