"""Any convolution of PyG on shards: outputs and all gradients are those on the whole graph."""

import copy

import convs
import pytest
import torch
from convs import (
    farthest,
    own,
    sample,
)
from torch import nn

from meshshard.comm import init_domain
from meshshard.nn import convert

TOLERANCE = 1e-12


def compared(make, whole, parts, name):
    """Run a convolution on whole tensors and on shards; every difference that is too large."""
    torch.manual_seed(1)
    conv = make().double()
    for p in conv.parameters():
        nn.init.normal_(p, std=0.4)
    ours = convert(copy.deepcopy(conv))
    args = [a.clone().requires_grad_() for a in whole[1:]]
    out = conv(args[0], whole[0], *args[1:])
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=out.dtype)
    leaves = [*args, *conv.parameters()]
    want = torch.autograd.grad(out, leaves, seed, allow_unused=True)
    graph, shards = parts[0], parts[1:]
    got = ours(shards[0], graph, *shards[1:])
    ((got * seed).sum()).backward()
    graph.domain.average_gradients(ours)
    found = {"output": farthest(got.detach().gather(), out.detach())}
    for i, shard in enumerate(shards):
        mine = want[i] if i == 0 else want[i][graph.edges.origin]
        grad = shard.grad.gather() if i == 0 else shard.grad.to_local()
        found[f"argument {i}"] = farthest(grad, mine, want[i].abs().max())
    rest = want[len(args) :]
    scale = torch.stack([w.abs().max() for w in rest if w is not None] or [torch.ones(())]).max()
    for (label, p), w in zip(ours.named_parameters(), rest, strict=True):
        found[label] = farthest(p.grad, w, scale)
    wrong = {k: v for k, v in found.items() if v > TOLERANCE}
    return {name: wrong} if wrong else {}


def convs_job(family, directed):
    """Every convolution of a family; those that are not exact."""
    domain = init_domain()
    edges, graph, x, e = sample(domain, directed)
    wrong = {}
    for name, make in getattr(convs, family).items():
        whole, shards = [edges, x], [graph, own(x, graph.nodes)]
        if family != "PLAIN":
            features = e[:, 0] if family == "WEIGHTED" else e
            whole.append(features)
            shards.append(graph.take(features).requires_grad_())
        wrong |= compared(make, whole, shards, name)
    return wrong


@pytest.mark.parametrize("directed", [False, True], ids=["symmetric", "directed"])
@pytest.mark.parametrize("family", ["PLAIN", "WITH_EDGES", "WEIGHTED"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_convolutions_are_exact(ranks, size, family, directed):
    found = (
        [convs_job(family, directed)] if size == 1 else ranks[size].run(convs_job, family, directed)
    )
    assert found == [{}] * size
