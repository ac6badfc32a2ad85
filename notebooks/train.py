"""meshshard launch N train.py MODEL STEPS: train on seven bodies, predict the eighth."""

import json
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import meshshard as ms

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)  # to compare runs to the last digits
domain = ms.comm.init_domain()  # the ranks that share one surface
kind, steps = sys.argv[1], int(sys.argv[2])


def body(run):
    shard = ms.load(f"shards/boundary_{run}.shards", domain)  # the owned rows of each rank
    inputs = [torch.cat([shard["center"], shard["normal"]], dim=1).double()]
    if kind == "MeshGraphNet":  # neighboring cells, and the vectors between them
        inputs += [shard.graph, ms.nn.edge_vectors(shard["center"].double(), shard.graph)]
    return shard, inputs, shard["CpMeanTrim"].double()[:, None]  # global shape


make = {"Transolver": lambda: ms.models.Transolver(6, 1, 32, layers=3, heads=4, slices=16),
        "MeshGraphNet": lambda: ms.models.MeshGraphNet(6, 3, 1, hidden=32, layers=4)}  # fmt: skip
model = make[kind]()
model = DistributedDataParallel(model) if domain.size > 1 else model
bodies, losses = [body(run) for run in (1, 2, 4, 6, 8, 10, 11)], []
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
for step in range(steps):
    _, inputs, truth = bodies[step % len(bodies)]
    loss = (model(*inputs) - truth).square().mean()  # a global mean, identical on every rank
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())

shard, inputs, truth = body(5)
with torch.no_grad():
    mesh = shard.gather({"prediction": model(*inputs)[:, 0]})  # in the order of the file
if domain.rank == 0:
    ms.write(mesh, f"{kind}_{domain.size}.vtp")
    Path(f"{kind}_{domain.size}.json").write_text(json.dumps(losses))
