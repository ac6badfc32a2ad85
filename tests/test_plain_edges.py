"""Convolutions of PyG with sharded rows and a plain edge_index; what `partition` refuses."""

import pytest
import torch
import torch_geometric.nn as pyg
from samples import AHMED

import meshshard
from meshshard.comm import DomainError, init_domain
from meshshard.errors import MeshshardError, MeshWarning
from meshshard.nn import convert
from meshshard.partitioning.partition import partition
from meshshard.ranks.shard import load
from meshshard.tensor import shard


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return partition(AHMED, 4).save(tmp_path_factory.mktemp("plain") / "four.shards")


def replicated(converted):
    """The same edges on every rank: exact, with a warning."""
    domain = init_domain()
    sizes = [9] if domain.size == 1 else [0, 9]
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(9, 3, generator=generator, dtype=torch.float64)
    edges = torch.randint(0, 9, (2, 30), generator=generator)
    torch.manual_seed(0)
    conv = pyg.GCNConv(3, 4).double()
    wanted = conv(whole, edges)
    conv = convert(conv) if converted else conv
    with pytest.warns(MeshWarning, match=r"plain edge_index: .* nn.convert and pass shard.graph"):
        out = conv(shard(whole, domain, sizes), edges)
    return torch.allclose(out, wanted, rtol=1e-12)


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_the_same_edges_on_every_rank_are_exact_with_a_warning(ranks, size, converted):
    assert all(ranks[size].run(replicated, converted) if size > 1 else [replicated(converted)])


def local(folder, equal):
    """Edges of local rows, as many on every rank or not."""
    held = load(folder, init_domain())
    edges = held.edge_index[:, :50] if equal else held.edge_index
    with pytest.raises(DomainError) as raised:
        pyg.SAGEConv(3, 4)(held["center"], edges)
    return str(raised.value)


@pytest.mark.parametrize("equal", [False, True])
def test_edges_of_local_rows_are_refused(ranks, folder, equal):
    for message in ranks[2].run(local, folder, equal):
        assert "edge_index that differs between the ranks" in message
        assert "pass shard.graph" in message


def results(folder):
    """What a shard refuses to save or to gather."""
    held = load(folder, init_domain())
    x = held["center"]
    plain, sizes = torch.zeros(len(x)), [len(x)] + [0] * (held.domain.size - 1)
    found = []
    for wrong in (plain, plain.numpy(), x.T, shard(plain, held.domain, sizes)):
        for method in (held.put, held.gather):
            if held.domain.size == 1 and wrong.shape == x.shape[:1] and hasattr(wrong, "sharding"):
                continue
            with pytest.raises(MeshshardError, match=r"'a' is (a plain|sharded along)") as raised:
                method({"a": wrong})
            found.append(str(raised.value))
    return found, hasattr(held.graph, "shape"), "center" in held, "Cp" in held, held.keys()


@pytest.mark.parametrize("size", [1, 2])
def test_results_that_are_not_sharded_like_the_fields_are_refused(ranks, folder, size):
    for found, *others, names in (
        ranks[size].run(results, folder) if size > 1 else [results(folder)]
    ):
        assert len(found) == (6 if size == 1 else 8)
        assert "put: 'a' is a plain ndarray; pass a sharded tensor" in found[2]
        assert others == [False, True, False]
        assert names[-4:] == ["center", "area", "area_vector", "normal"]


def launched(folder):
    return load(folder).sizes.tolist()


def test_load_takes_the_ranks_that_were_launched(ranks, folder):
    assert [len(sizes) for sizes in ranks[2].run(launched, folder)] == [2, 2]
    assert len(launched(folder)) == 1


def test_dir_lists_the_modules():
    assert {"nn", "models", "comm", "viz", "tensor"} <= set(dir(meshshard))
