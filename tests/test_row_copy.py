"""A row x[i] of a sharded tensor is a copy on every rank that behaves as torch's view."""

import copy
import pickle

import pytest
import torch

from meshshard.comm import simulate
from meshshard.tensor import NoShardRule, ShardTensor, shard

WRITES = {
    "add_": lambda x: x[0].add_(1),
    "zero_ of the last": lambda x: x[-1].zero_(),
    "copy_ of another row": lambda x: x[2].copy_(x[3]),
    "select": lambda x: x.select(0, 1).mul_(2),
    "part of a row": lambda x: x[1, :2].add_(1),
    "view of a row": lambda x: x[1].view(3, 1)[2].fill_(9),
    "row of a view": lambda x: x.flatten()[0].add_(5),
    "row of a column": lambda x: x[:, 1][3].fill_(7),
    "init": lambda x: torch.nn.init.zeros_(x[0]),
    "inplace=": lambda x: torch.nn.functional.relu(x[1].sub_(4), inplace=True),
    "out=": lambda x: torch.add(x[1], 1, out=x[2]),
    "setitem": lambda x: x[1].__setitem__(0, 9.0),
    "iadd": lambda x: x[1].__iadd__(1),
    "several": lambda x: [row.add_(1) for row in [x[3]] for _ in range(3)],
}


def table():
    return torch.arange(15, dtype=torch.float64).reshape(5, 3)


@pytest.mark.parametrize("sizes", [(5,), (1, 0, 4), (0, 5, 0)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_into_a_row_reaches_its_owner(name, mode, sizes):
    def _job(domain):
        with mode():
            want = table()
            x = shard(table(), domain, sizes).clone()
            WRITES[name](want)
            WRITES[name](x)
            return torch.equal(x.gather(), want)

    assert all(simulate(len(sizes), _job))


def test_a_row_follows_torch_elsewhere():
    def _job(domain):
        x = shard(table(), domain, (1, 0, 4)).clone()
        row = x[1]
        assert type(row + 1) is torch.Tensor
        assert type(torch.stack([row, row])) is torch.Tensor
        assert type(row + x) is type(x + row) is ShardTensor
        assert torch.equal((row + x).gather(), table()[1] + table())
        assert row.tolist() == [3, 4, 5]
        assert row.numpy().sum() == 12
        with pytest.raises(ValueError, match="read-only"):
            row.numpy()[0] = 1
        for other in (copy.deepcopy(row), pickle.loads(pickle.dumps(row))):
            assert type(other) is torch.Tensor
            assert torch.equal(other, row)
        leaf = shard(table(), domain, (1, 0, 4)).requires_grad_()
        (leaf * leaf[1]).sum().backward()
        serial = table().requires_grad_()
        (serial * serial[1]).sum().backward()
        return torch.allclose(leaf.grad.gather(), serial.grad)

    assert all(simulate(3, _job))


def test_a_row_is_refused_after_its_tensor_has_changed():
    def _job(domain):
        x = shard(table(), domain, (1, 0, 4)).clone()
        row = x[2]
        x.mul_(10)
        for use in (lambda: row + 1, lambda: x + row, lambda: torch.stack([row])):
            with pytest.raises(NoShardRule, match="take the row again"):
                use()

    simulate(3, _job)


def test_writing_into_a_row_that_is_differentiated_is_refused():
    def _job(domain):
        x = shard(table(), domain, (1, 0, 4)).requires_grad_() * 2
        with pytest.raises(NoShardRule, match="add_ has no exact rule for a row"):
            x[1].add_(1)
        with pytest.raises(NoShardRule, match="that is expanded"):
            x.detach().expand(2, 5, 3)[:, 1].fill_(1)

    simulate(3, _job)
