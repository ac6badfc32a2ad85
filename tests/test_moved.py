"""A reshape whose elements move is a copy: writes that a view of torch shares are refused."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from meshshard.comm import simulate
from meshshard.tensor import NoShardRule, moved, shard

X = torch.arange(42.0).reshape(2, 7, 3)
WRITES = {  # into x, and f, which in torch is a view of x
    "in place": lambda x, f: x.add_(1),
    "a view": lambda x, f: x.transpose(0, 2).add_(1),
    "a row": lambda x, f: x[:, 3].add_(1),
    "items": lambda x, f: x.__setitem__((slice(None), 2), 5.0),
    "detached": lambda x, f: x.detach().mul_(2),
    "data": lambda x, f: x.data.mul_(2),
    "a list": lambda x, f: torch._foreach_add_([x], 1.0),
    "inplace=": lambda x, f: F.relu(x, inplace=True),
    "inplace": lambda x, f: F.leaky_relu(x, 0.1, True),
    "out=": lambda x, f: torch.add(x, 1, out=x),
    "the copy": lambda x, f: f.add_(1),
    "a view of the copy": lambda x, f: f[3:9].add_(1),
    "out= the copy": lambda x, f: torch.add(f, 1, out=f),
}


def placed(domain):
    return shard(X.clone(), domain, (2, 0, 5), dim=1).clone()


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_refused_while_both_exist(name):
    def _job(domain):
        x = placed(domain)
        f = x.flatten()
        with pytest.raises(NoShardRule, match="elements moved between ranks"):
            WRITES[name](x, f)
        rest = f[4:30]
        del f
        with pytest.raises(NoShardRule, match="elements moved between ranks"):
            x.add_(1)
        assert torch.equal(rest.gather(), X.flatten()[4:30])
        del rest
        x.add_(1)
        return torch.equal(x.gather(), X + 1)

    assert all(simulate(3, _job))


@pytest.mark.parametrize("name", ["in place", "inplace=", "out=", "a list"])
def test_other_writes_are_exact(name):
    def _job(domain):
        x, y, want = placed(domain), placed(domain), X.clone()
        f = x.flatten()
        F.relu(x), x.add(1), f.mul(2)
        WRITES[name](y, None)
        WRITES[name](want, None)
        return torch.equal(y.gather(), want) and torch.equal(f.gather(), X.flatten())

    assert all(simulate(3, _job))


def test_the_copy_alone_may_be_written():
    def _job(domain):
        f = placed(domain).flatten()
        return torch.equal(f.add_(1).gather(), X.flatten() + 1)

    assert all(simulate(3, _job))


def test_pairs_that_no_longer_exist_are_forgotten():
    def _job(domain):
        x = placed(domain)
        for _ in range(50):
            x.flatten()
        return True

    before = len(moved._pairs)
    assert all(simulate(3, _job))
    assert len(moved._pairs) <= before + 3  # the last of each rank, until the next is made
