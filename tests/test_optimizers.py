"""PyTorch's optimizer database on sharded parameters, in all its options, against one process."""

import pytest
import torch
from torch.testing._internal.common_optimizers import optim_db

from meshshard.comm import DomainError, simulate
from meshshard.tensor import NoShardRule, ShardTensor, shard

ROWS, SIZES = 9, (4, 0, 5)
X, Y = torch.randn(2, ROWS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
# Adafactor scales rows by means of the factors, Muon multiplies in bfloat16.
REFUSED = {("Adafactor", "foreach")}
SLACK = {"Muon": 2e-2}


def runs(info):
    """Options of an optimizer, with each of its implementations that runs on a CPU."""
    for given in info.optim_inputs_func("cpu"):
        for implementation in ("", *info.supported_impls):
            if "capturable" not in given.kwargs:
                flag = {implementation: True} if implementation else {}
                yield implementation, given.kwargs | flag


def trained(info, options, place):
    """Two parameters and the state of the optimizer after three steps."""
    x, y, target = place(X.clone()), place(Y.clone()), place(Y.clone())
    optimizer = info.optim_cls([x.requires_grad_(), y.requires_grad_()], **options)

    def closure():
        optimizer.zero_grad()
        loss = (x * y - target).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        if info.step_requires_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    state = (v for values in optimizer.state.values() for v in values.values())
    tensors = [x, y, *(v for v in state if isinstance(v, torch.Tensor))]
    return [t.detach().gather() if type(t) is ShardTensor else t.detach() for t in tensors]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("info", optim_db, ids=lambda info: info.name)
def test_steps_equal_one_process(info):
    n_runs, slack = 0, SLACK.get(info.name, 1e-9)
    for implementation, options in runs(info):
        try:
            want = trained(info, options, lambda x: x)
        except (RuntimeError, ValueError, TypeError):  # options that do not go together
            continue

        def _job(domain, options=options, want=want):
            got = trained(info, options, lambda x: shard(x, domain, SIZES))
            for g, w in zip(got, want, strict=True):
                torch.testing.assert_close(g, w, rtol=slack, atol=slack)

        if (info.name, implementation) in REFUSED:
            with pytest.raises((NoShardRule, DomainError), match="has no exact rule"):
                simulate(3, _job)
        else:
            simulate(3, _job)
            n_runs += 1
    assert n_runs or info.name == "SparseAdam"
