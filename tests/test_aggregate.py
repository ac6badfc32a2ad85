"""Sums, means and maxima over in-edges: values, gradients, traffic and what is refused."""

import pytest
import torch
from convs import C, farthest, own, sample, serial
from torch_geometric.utils import scatter

from meshshard.comm import Domain, init_domain
from meshshard.comm.domain import count_traffic
from meshshard.errors import MeshshardError
from meshshard.nn import aggregate
from meshshard.tensor import Sharding, ShardTensor


def job(shape):
    """Against PyG's scatter, with ties; on shards with and without interior nodes."""
    domain = init_domain()
    far = []
    for directed in (False, True):
        edges, graph, x, _ = sample(domain, directed)
        x = torch.round(x * 2).relu()[:, :4].reshape(60, *shape)
        for reduce in ("sum", "mean", "max"):
            a, b = x.clone().requires_grad_(), own(x, graph.nodes)
            want = scatter(a[edges[0]], edges[1], 0, 60, reduce)
            with count_traffic(domain) as forward:
                got = aggregate(b, graph, reduce)
            (want**3).sum().backward()
            with count_traffic(domain) as backward:
                (got.to_local() ** 3).sum().backward()
            assert got.sharding == graph.nodes
            grad = b.grad.gather() * domain.size  # the loss was not made one of all ranks
            far += [farthest(got.detach().gather(), want.detach()), farthest(grad, a.grad)]
            if domain.size > 1:
                assert forward.counts["exchange"].calls == 1
                assert backward.counts["accumulate"].calls == 1
                width = x[0].numel() * 8
                assert forward.counts["exchange"].bytes == sum(graph.exchange.send) * width
                assert backward.counts["accumulate"].bytes == graph.exchange.n_halo * width
    return max(far)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["matrix", "heads"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_against_scatter(ranks, size, shape):
    found = [job(shape)] if size == 1 else ranks[size].run(job, shape)
    assert max(found) < 1e-12


def test_what_is_refused():
    edges, graph, x, _ = sample(Domain(), directed=True)
    with pytest.raises(MeshshardError, match="unknown reduction 'median'; use sum, mean or max"):
        aggregate(x, graph, "median")
    with pytest.raises(MeshshardError, match=r"a plain tensor \(5, 8\); expected 60 sources"):
        aggregate(x[:5], graph)
    with pytest.raises(MeshshardError, match="as the graph's sources"):
        aggregate(ShardTensor.from_local(x[:5], Sharding(Domain(), [5])), graph)
    assert torch.equal(aggregate(x, graph), aggregate(x, serial(edges)))
    assert aggregate(x, graph).shape == (60, C)
