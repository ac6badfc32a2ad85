"""Peak memory of layers in fresh processes: proportional to rows, not to pairs of rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/self/clear_refs").exists(),
        reason="the peak of a process can be reset only on Linux",
    ),
]

MEASURE = """
import json, sys
import torch
import torch_geometric.nn as pyg
from torch import nn
from meshshard import comm, models
from meshshard import nn as layers
from meshshard.comm import Domain
from meshshard.tensor import ShardGraph, Sharding, ShardTensor

torch.set_num_threads(1)

def resident(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

def above(call):
    "Peak bytes of a call above those before it; the call has run once."
    call()
    open("/proc/self/clear_refs", "w").write("5")
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before

"""


def peak(code: str) -> list[float]:
    """Peak bytes of each of `calls`, a list that `code` defines, above those before the call."""
    given = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}  # freed memory goes back
    done = subprocess.run(
        [sys.executable, "-c", f"{MEASURE}{code}\nprint(json.dumps([above(c) for c in calls]))"],
        env=os.environ | given,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not done.returncode, done.stderr
    found: list[float] = json.loads(done.stdout)
    return found


def test_slice_attention_saves_only_its_input() -> None:
    code = """
n, C = 40_000, 128
x = torch.randn(n, C, requires_grad=True)
made = [layers.SliceAttention(C, 8, 32, tile=tile) for tile in (None, 0)]
calls = [lambda layer=layer: layer(x).sum().backward() for layer in made]
"""
    ours, ordinary = peak(code)
    assert ours < 4.5 * 40_000 * 128 * 4
    assert ours < ordinary / 3


def test_blocks_save_only_their_input() -> None:
    code = """
n, C = 20_000, 64
x = torch.randn(n, 3)
made = [models.Transolver(3, 1, C, layers, 4, 16) for layers in (1, 4)]
calls = [lambda model=model: model(x).sum().backward() for model in made]
"""
    one, four = peak(code)
    assert (four - one) / 3 < 1.2 * 20_000 * 64 * 4


def test_prediction_holds_one_hidden_state() -> None:
    code = """
n, C = 40_000, 128
x = torch.randn(n, 3)
calls = [lambda: models.Transolver(3, 1, C, 2, 8, 32).predict(x)]
"""
    (found,) = peak(code)
    assert found < 1.5 * 40_000 * 128 * 4


def test_ring_attention_does_not_hold_all_scores() -> None:
    code = """
n, C, heads = 8_192, 32, 4
whole = torch.randn(n, C)
layer = nn.MultiheadAttention(C, heads, batch_first=True)

def step(domain):
    sharding = Sharding(domain, (n // 2 + 100, n // 2 - 100))
    own = whole[sharding.first :][: sharding.own]
    x = ShardTensor.from_local(own, sharding).requires_grad_()
    layer(x[None], x[None], x[None], need_weights=False)[0].square().mean().backward()

calls = [lambda: comm.simulate(2, step)]
"""
    (found,) = peak(code)
    assert found < 8_192**2 * 4 / 4  # a quarter of one head's scores


def test_sums_along_edges_do_not_hold_a_row_for_each_edge() -> None:
    code = """
n, C = 30_000, 64
edges = torch.randint(0, n, (2, 8 * n))
graph = ShardGraph.from_edge_index(edges, Sharding(Domain(), [n]))
x = torch.randn(n, C, requires_grad=True)
made = [layers.convert(conv) for conv in (pyg.GCNConv(C, C), pyg.SAGEConv(C, C))]
calls = [
    lambda conv=conv, where=where: conv(x, where).sum().backward()
    for conv in made for where in (edges, graph)
]
"""
    gcn_plain, gcn, sage_plain, sage = peak(code)  # with an edge_index a layer is PyG's own
    assert max(gcn, sage) < 30_000 * 8 * 64 * 4
    assert max(gcn / gcn_plain, sage / sage_plain) < 0.5
