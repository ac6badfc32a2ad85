"""Ranks that make different calls: all of them raise, name both calls, and use no result."""

import inspect
import os
import random
import re
import subprocess
import sys
import time

import pytest
import torch
from ranks import Ranks

from meshshard.comm import Domain, DomainError, init_domain, simulate
from meshshard.comm.linear import AllToAll
from meshshard.comm.matching import Matching, call_of, matching_of
from meshshard.comm.process_group import ProcessGroupTransport
from meshshard.tensor import shard


def rows(domain, width=2):
    return shard(torch.ones(6, width), domain, [6 - domain.size + 1] + [1] * (domain.size - 1))


def only_on_rank_0(domain):
    if domain.rank == 0:
        rows(domain).mean()
    return rows(domain).mean()


def last_call_only_on_rank_0(domain):
    x = rows(domain).mean()
    if domain.rank == 0:
        x = rows(domain).mean()
    return domain.share(x.item())


def skipped_backward(domain):
    layer = torch.nn.Linear(2, 1)
    loss = layer(rows(domain)).sum()
    if domain.rank:
        loss.backward()
    domain.average_gradients(layer)


def another_order(domain):
    calls = [
        lambda: domain.all_reduce(torch.ones(2)),
        lambda: domain.all_reduce(torch.ones(2), "max"),
    ]
    return [call() for call in (reversed(calls) if domain.rank else calls)]


def another_shape(domain):
    return domain.all_reduce(torch.ones(2 + (domain.rank == domain.size - 1)))


def another_dtype(domain):
    return domain.all_reduce(torch.ones(2, dtype=torch.float64 if domain.rank else torch.float32))


def another_kind(domain):
    if domain.rank:
        return domain.all_gather(torch.ones(2, 2), [2] * domain.size)
    return domain.all_reduce(torch.ones(2, 2))


def another_row(domain):
    return domain.all_gather(torch.ones(2, 2 + domain.rank), [2] * domain.size)


def another_table(domain):
    send, receive = [1] * domain.size, [1 + (domain.rank == 1)] * domain.size
    return AllToAll(domain, tuple(send), tuple(receive))(torch.ones(domain.size, 2))


REDUCE = r"all_reduce\(sum, \(\), torch.float32\) at test_matching.py:"
CASES = {
    only_on_rank_0: f"rank 0 in {REDUCE}LINE2, rank 1 in {REDUCE}LINE3",
    last_call_only_on_rank_0: rf"rank 0 in {REDUCE}LINE3, rank 1 in gather_objects\(\) at .*:LINE4",
    skipped_backward: r"rank 0 in all_reduce\(.*:LINE5, rank 1 in all_reduce\(.*:LINE4",
    another_order: r"rank 0 in all_reduce\(sum, .*, rank 1 in all_reduce\(max, ",
    another_shape: r"in all_reduce\(sum, \(2,\), .* in all_reduce\(sum, \(3,\), ",
    another_dtype: r"rank 0 in .*, torch.float32\) at .*, rank 1 in .*, torch.float64\) at ",
    another_kind: r"rank 0 in all_reduce\(sum, \(2, 2\), .*, rank 1 in all_to_all\(\(2,\), ",
    another_row: r"rank 0 in all_to_all\(\(2,\), .*, rank 1 in all_to_all\(\(3,\), ",
    another_table: r"all_to_all\(.* rank 0 sends 1 row to rank 1, which expects 2",
}  # fmt: skip


def with_domain(call, *args):
    return call(init_domain(), *args)


def matching(domain):
    return matching_of(domain.group, domain.transport._gather)


def message_of(call):
    """The error of a call; fails if there is none."""
    with pytest.raises(DomainError) as raised:
        call(init_domain())
    return str(raised.value)


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_raise_and_name_both_calls(ranks, case):
    first = inspect.getsourcelines(case)[1]
    wanted = CASES[case]
    for line in range(8):
        wanted = wanted.replace(f"LINE{line}", str(first + line))
    messages = ranks[2].run(message_of, case)
    assert len(set(messages)) == 1
    assert re.search(wanted, messages[0])


@pytest.mark.parametrize("case", CASES)
def test_three_ranks_raise_and_name_two_calls(ranks, case):
    for message in ranks[3].run(message_of, case):
        assert re.search(r"rank \d in .*, rank \d in |sends 1 row to rank 1", message)


@pytest.mark.parametrize("case", CASES)
def test_simulated_ranks_raise_alike(case):
    with pytest.raises(DomainError, match=r"different collectives|sends 1 row"):
        simulate(3, case)


def without_waiting(case, late):
    """A case on a group of its own, whose ranks no longer wait for each other; one comes late."""
    domain = Domain(ProcessGroupTransport(torch.distributed.new_group()))
    domain.share(0)
    matching(domain).waited = 0
    if domain.rank == late:
        time.sleep(0.3)
    with pytest.raises(DomainError) as raised:
        case(domain)
    with pytest.raises(DomainError, match="cannot be used any more"):
        domain.all_reduce(torch.ones(2))
    return str(raised.value)


@pytest.mark.parametrize("late", range(3))
@pytest.mark.parametrize("case", [c for c in CASES if c not in (another_row, another_table)])
def test_ranks_that_do_not_wait_raise_alike(ranks, case, late):
    for message in ranks[3].run(without_waiting, case, late):
        assert re.search(r"rank \d in .*, rank \d in ", message)


def stays_away(domain, how):
    """Rank 0 is in an all-reduce, without having waited, when rank 1 ends."""
    domain.share(0)
    matching(domain).waited = 0
    domain.all_reduce(torch.ones(3))
    if domain.rank:
        time.sleep(0.3)
        how(domain)
        return None
    return message_of(lambda d: d.all_reduce(torch.ones(3)))


@pytest.mark.parametrize("how", ["dies", "closes"])
def test_a_rank_that_ends_during_a_call_is_named(how):
    pool = Ranks(2)
    pool._send(with_domain, (stays_away, globals()[how]))
    error, message = pool.pipes[0].recv()
    pool.stop()
    assert error is None
    assert re.search(r"rank 0 is in all_reduce\(.* but rank 1 has ended after 2 coll", message)


def of_random_duration(domain):
    """Many all-reduces by ranks that do not wait for each other, with rows between them."""
    before, matching(domain).waited = matching(domain).waited, 0
    pause = random.Random(domain.rank)
    for step in range(300):
        time.sleep(pause.choice([0, 0, 0, 3e-4, 3e-3]) if step % 100 else 0.15 * domain.rank)
        assert domain.all_reduce(torch.full((2,), step)).tolist() == [domain.size * step] * 2
        if step % 7 == 0:
            assert domain.share(step) == [step] * domain.size
    matching(domain).waited = before


def test_all_reduces_without_waiting_are_right(ranks):
    ranks[3].run(with_domain, of_random_duration)


def dies(domain):
    os._exit(3)


def closes(domain):
    domain.close()


def ends(how):
    """The other rank ends after two collectives."""
    domain = init_domain()
    domain.share(0)
    domain.share(0)
    if domain.rank:
        how(domain)
        return None
    return message_of(lambda d: d.all_reduce(torch.ones(3)))


@pytest.mark.parametrize("how", [dies, closes])
def test_a_rank_that_has_ended_is_named_by_the_others(how):
    pool = Ranks(2)
    pool._send(ends, (how,))
    error, message = pool.pipes[0].recv()
    pool.stop()
    assert error is None
    assert re.search(r"rank 0 is in all_reduce\(.* but rank 1 has ended after 2 coll", message)


SCRIPT = """
import torch
from meshshard.comm import init_domain

domain = init_domain()
domain.share(0)
if domain.rank:
    raise ValueError("my own mistake")
try:
    domain.all_reduce(torch.ones(3))
except Exception as error:
    open("message.txt", "w").write(str(error))
"""


@pytest.mark.slow
def test_a_rank_that_raised_is_named_by_the_others(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "meshshard", "launch", "2", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "error: rank 1: ValueError: my own mistake"
    message = (tmp_path / "message.txt").read_text()
    assert re.search(r"rank 0 is in .* at script.py:10, but rank 1 has ended after 1 coll", message)


def late(domain):
    """Rank 1 comes when the others have given up."""
    if domain.rank:
        matching(domain).board.timeout = 1e-3
    else:
        while not matching(domain).board.state(1):
            time.sleep(0.01)
    domain.all_reduce(torch.ones(2))


def test_a_late_rank_does_not_wait_for_those_that_gave_up():
    pool = Ranks(2)
    first, second = pool.run(message_of, late)
    pool.stop()
    assert re.search(r"rank 0 is in .* but rank 1 has raised an error after 0 coll", first)
    assert "rank 0 has not entered it within" in second


def in_turn(domain):
    """Many calls of all kinds on two groups, at random times; a copy of the domain counts along."""
    other = Domain(ProcessGroupTransport(torch.distributed.new_group()))
    again = init_domain()
    before, pause = matching(domain).count, random.Random(domain.rank)
    for step in range(200):
        time.sleep(pause.choice([0, 0, 0, 3e-4, 3e-3]))
        ranks = (domain, other, again)[step % 3]
        assert ranks.all_reduce(torch.ones(2)).tolist() == [domain.size] * 2
        assert ranks.share(step) == [step] * domain.size
    return matching(domain).count - before, matching(other).count


def test_groups_count_separately(ranks):
    for whole, part in ranks[3].run(with_domain, in_turn):
        assert (whole, part) == (2 * 67 + 2 * 66, 2 * 67)


def without_shared_memory(domain):
    """As on several machines: the first two calls are compared."""
    matching, gather = Matching(None, 2), domain.transport._gather
    matching.enter(call_of("same"), gather)
    with pytest.raises(DomainError) as raised:
        matching.enter(call_of("other", domain.rank), gather)
    matching.enter(call_of("different", domain.rank), gather)
    return str(raised.value)


def test_ranks_of_several_machines_gather_their_calls(ranks):
    for message in ranks[2].run(with_domain, without_shared_memory):
        assert re.search(r"rank 0 in other\(0\) at .*, rank 1 in other\(1\) at ", message)


def unchecked(domain):
    """Three calls, the third of which differs in the line alone."""
    for _ in range(2):
        domain.all_reduce(torch.ones(2))
    if domain.rank:
        domain.all_reduce(torch.ones(2))
    else:
        domain.all_reduce(torch.ones(2))
    return matching(domain).board is None


@pytest.mark.parametrize("calls", ["0", "2"])
def test_an_environment_variable_limits_the_comparison(calls, monkeypatch):
    monkeypatch.setenv("MESHSHARD_CHECKED_CALLS", calls)
    pool = Ranks(2)
    assert pool.run(with_domain, unchecked) == [calls == "0"] * 2
    pool.stop()
