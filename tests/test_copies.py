"""Copies, pickles and workers of what holds a domain: alike on one rank and on many."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
import torch_geometric.nn as pyg
from samples import AHMED

from meshshard.comm import DomainError, init_domain
from meshshard.nn import convert, knn_graph
from meshshard.partitioning.partition import partition
from meshshard.ranks.shard import load
from meshshard.tensor import NoShardRule


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return partition(AHMED, 4).save(tmp_path_factory.mktemp("copies") / "four.shards")


class Model(torch.nn.Module):
    """A model that keeps its graph and a field."""

    def __init__(self, shard):
        super().__init__()
        torch.manual_seed(0)
        self.graph, self.shard, self.scale = shard.graph, shard, shard["area"]
        self.conv = convert(pyg.GCNConv(3, 2))

    def forward(self, x):
        return self.conv(x, self.graph) * self.scale[:, None]


def copies(folder):
    """A copy of a model computes the same, on the same graph, after the original is deleted."""
    shard = load(folder, init_domain())
    model, x = Model(shard), shard["center"]
    wanted = model(x).detach().gather()
    twin = copy.deepcopy(model)
    assert twin.graph is model.graph
    assert twin.shard.domain is shard.domain
    assert twin.shard["center"] is not x
    with torch.no_grad():
        model.scale.zero_()
        del model
        return torch.equal(twin(x).gather(), wanted), "center" in twin.shard, list(twin.shard)


@pytest.mark.parametrize("size", [1, 2])
def test_copies_of_a_model_share_its_graph(ranks, folder, size):
    jobs = ranks[size].run(copies, folder) if size > 1 else [copies(folder)]
    for equal, contains, found in jobs:
        assert equal
        assert contains
        assert found[:2] == ["CpMeanTrim", "pMeanTrim"]


def refusals(folder):
    """What pickle and torch.save say, of everything that holds a domain."""
    shard = load(folder, init_domain())
    x = shard["center"]
    graph = knn_graph(x, 3)
    found = []
    for thing in (shard, shard.graph, graph, x, x.sharding, shard.exchange, Model(shard)):
        for save in (pickle.dumps, lambda thing: torch.save(thing, io.BytesIO())):
            with pytest.raises((DomainError, NoShardRule), match=r"cannot be saved.*x.gather\(\)"):
                save(thing)
            found.append(type(thing).__name__)
    torch.save(Model(shard).state_dict(), io.BytesIO())
    return len(found)


@pytest.mark.parametrize("size", [1, 2])
def test_pickle_and_save_are_refused(ranks, folder, size):
    found = ranks[size].run(refusals, folder) if size > 1 else [refusals(folder)]
    assert found == [14] * size


WORKERS = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset
from meshshard.comm import DomainError, init_domain
from meshshard.ranks.shard import load


class Fields(Dataset):
    def __init__(self, shard):
        self.shard = shard

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return i, self.shard["center"] * i, self.shard.graph


class Sums(Fields):
    def __getitem__(self, i):
        return self.shard["center"].sum().item()


class Loads(Fields):
    def __getitem__(self, i):
        return load(self.shard.folder.path)["center"].shape


def main():
    domain = init_domain()
    shard = load("four.shards")
    shard.graph
    for how in ("fork", "spawn"):
        workers = {"num_workers": 2, "multiprocessing_context": how, "batch_size": None}
        for i, x, graph in DataLoader(Fields(shard), **workers):
            assert torch.equal(x.gather(), shard["center"].gather() * i)
            assert (x + shard["center"]).sharding.domain.group is domain.group
            assert graph.lift(x)[0].sum().isfinite()
    for kind in (Sums, Loads):
        workers = {"num_workers": 2, "multiprocessing_context": "fork", "batch_size": None}
        try:
            said = next(iter(DataLoader(kind(shard), **workers)))
        except DomainError as error:
            said = str(error)
        assert ("this process is not a rank" in str(said)) == (domain.size > 1), said
    print("done")


if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [["script.py"], ["-m", "meshshard", "launch", "2", "script.py"]])
def test_workers_of_a_data_loader_get_and_return_sharded_objects(folder, words):
    (folder.parent / "script.py").write_text(WORKERS)
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["done"] * (2 if "launch" in words else 1), done.stderr
