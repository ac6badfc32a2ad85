"""What PyTorch would call on the owned rows without `__torch_function__` is refused by name."""

import pytest
import torch
import torch.utils.dlpack
from torch import nn

from meshshard.comm import simulate
from meshshard.tensor import NoShardRule, shard

WEIGHT = torch.ones(3, 2)
SCRIPTED = torch.jit.script(nn.Softmax(0))
TRACED = torch.jit.trace(lambda x: x.mean(0), torch.ones(6, 2))


REFUSED = {
    "TorchScript|Softmax.forward": (SCRIPTED, TRACED, torch.jit.script(nn.functional.tanhshrink)),
    "torch.func": (
        torch.func.grad(lambda x: (x * x).sum()),
        torch.func.jacrev(lambda x: x * x),
        lambda x: torch.func.vjp(torch.sin, x),
        lambda x: torch.func.functionalize(torch.sin)(x),
        lambda x: torch.func.vmap(lambda w: x @ w)(WEIGHT),
        lambda x: torch.func.vmap(lambda w: x + w)(WEIGHT),
        lambda x: torch.func.vmap(torch.sin)(x).sum(),
        lambda x: torch.func.grad(lambda w: (x @ w).sum())(WEIGHT[0]),
        lambda x: torch.func.jacrev(lambda w: x @ w)(WEIGHT[0]),
    ),
    "to_dlpack": (torch.utils.dlpack.to_dlpack,),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_on_owned_rows_are_refused(name):
    def _job(domain):
        x = shard(torch.arange(12.0).view(6, 2), domain, (4, 0, 2))
        for call in REFUSED[name]:
            with pytest.raises(NoShardRule, match=f"{name}|vmap"):
                call(x)
            x.requires_grad_()
            with pytest.raises(NoShardRule, match=f"{name}|vmap"):
                call(x)
            x = x.detach()
        return True

    assert all(simulate(3, _job))


def test_plain_tensors_are_not_affected():
    x = torch.rand(6, 2)
    assert torch.equal(SCRIPTED(x), x.softmax(0))
    assert torch.equal(TRACED(x), x.mean(0))
    assert torch.equal(torch.func.grad(lambda y: (y * y).sum())(x), 2 * x)
    assert torch.equal(torch.func.vmap(torch.sin)(x), torch.sin(x))
    assert torch.equal(torch.func.functionalize(torch.sin)(x), torch.sin(x))
    assert torch.equal(torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)), x)
