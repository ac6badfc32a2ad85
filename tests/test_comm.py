"""Collectives: values, exact adjoints, second derivatives, traffic, and errors."""

import time

import pytest
import torch
from ranks import Ranks

from meshshard.comm import Domain, DomainError, Exchange, count_traffic, init_domain, simulate
from meshshard.errors import MeshshardError

SIZES = {1: (7,), 2: (3, 8), 3: (4, 0, 5), 4: (2, 7, 0, 1)}
WANTED = {1: (7,), 2: (10, 1), 3: (0, 9, 0), 4: (3, 3, 3, 1)}


def whole(sizes, width=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(sizes), width, dtype=torch.float64, generator=generator)


def mine(domain, sizes, seed=0):
    first = domain.offset(sizes)
    return whole(sizes, seed=seed)[first : first + sizes[domain.rank]]


def ring_plan(domain, n_owned=4):
    """Every rank sends its last two rows to the next rank, its first one twice to the previous."""
    send, receive = [0] * domain.size, [0] * domain.size
    rows = []
    for peer in range(domain.size):
        if peer == (domain.rank + 1) % domain.size:
            rows += [n_owned - 2, n_owned - 1]
            send[peer] += 2
        if peer == (domain.rank - 1) % domain.size:
            rows += [0, 0]
            send[peer] += 2
        receive[peer] += 2 * (peer == (domain.rank - 1) % domain.size)
        receive[peer] += 2 * (peer == (domain.rank + 1) % domain.size)
    return Exchange(domain, n_owned, torch.tensor(rows), send, receive, "ring")


def total(domain, x):
    return sum(domain.share(x.item()))


def operators(domain):
    sizes, wanted = SIZES[domain.size], WANTED[domain.size]
    everything = tuple(sum(sizes) if r == 0 else 0 for r in range(domain.size))
    moved = tuple(sizes[(r - 1) % domain.size] for r in range(domain.size))
    plan = ring_plan(domain)
    four = (4,) * domain.size
    local = (4 + plan.n_halo,) * domain.size
    same = (5,) * domain.size
    return {
        "all_reduce": (lambda x: domain.all_reduce(x), same, same),
        "all_gather": (lambda x: domain.all_gather(x, sizes), sizes, (sum(sizes),) * domain.size),
        "gather": (lambda x: domain.gather(x, sizes), sizes, everything),
        "scatter": (lambda x: domain.scatter(x, sizes), everything, sizes),
        "shift": (lambda x: domain.shift(x, sizes), sizes, moved),
        "redistribute": (lambda x: domain.redistribute(x, sizes, wanted), sizes, wanted),
        "exchange": (lambda x: domain.exchange(x, plan), four, local),
    }


def adjoint_job(name):
    """<A x, y> = <x, A* y>, summed over ranks."""
    domain = init_domain()
    operator, before, after = operators(domain)[name]
    x = mine(domain, before, seed=1).clone().requires_grad_()
    y = mine(domain, after, seed=2)
    out = operator(x)
    (back,) = torch.autograd.grad(out, x, y, create_graph=True)
    left, right = total(domain, (out * y).sum()), total(domain, (x * back).sum())
    return out.shape[0] - after[domain.rank], left, right


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "name", ["all_reduce", "all_gather", "gather", "scatter", "shift", "redistribute", "exchange"]
)
def test_adjoints_are_exact(ranks, size, name):
    for extra, left, right in ranks[size].run(adjoint_job, name):
        assert extra == 0
        assert left == pytest.approx(right, rel=1e-13)


def second_job(name):
    """The gradient of half the squared output, differentiated once more: A* A, exact."""
    domain = init_domain()
    operator, before, _ = operators(domain)[name]
    x = mine(domain, before, seed=1).clone().requires_grad_()
    (first,) = torch.autograd.grad((operator(x) ** 2).sum() / 2, x, create_graph=True)
    v = mine(domain, before, seed=3)
    (second,) = torch.autograd.grad((first * v).sum(), x)
    with torch.no_grad():
        a = operator(v)
    left, right = total(domain, (second * v).sum()), total(domain, (a * a).sum())
    return left, right


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "shift", "redistribute", "exchange"])
def test_second_derivatives(ranks, name):
    for left, right in ranks[3].run(second_job, name):
        assert left == pytest.approx(right, rel=1e-12)


def values_job():
    domain = init_domain()
    sizes, wanted = SIZES[domain.size], WANTED[domain.size]
    x, every = mine(domain, sizes), whole(sizes)
    assert torch.equal(domain.all_gather(x, sizes), every)
    root = domain.size - 1
    collected = domain.gather(x, sizes, root)
    assert torch.equal(collected, every if domain.rank == root else every[:0])
    assert torch.equal(domain.scatter(collected, sizes, root), x)
    first = domain.offset(wanted)
    moved = domain.redistribute(x, sizes, wanted)
    assert torch.equal(moved, every[first : first + wanted[domain.rank]])
    for steps in range(domain.size):
        other = (domain.rank - steps) % domain.size
        start = sum(sizes[:other])
        assert torch.equal(domain.shift(x, sizes, steps), every[start : start + sizes[other]])
    assert domain.all_reduce(torch.tensor(domain.rank + 1.0)).item() == sum(
        range(1, domain.size + 1)
    )
    return True


@pytest.mark.parametrize("size", [2, 3, 4])
def test_values(ranks, size):
    assert all(ranks[size].run(values_job))


def layouts_job():
    """A tensor whose memory layout is transposed on one rank."""
    domain = init_domain()
    x = torch.arange(6.0).reshape(2, 3) * (1 if domain.rank else -1)
    x = x.T.contiguous().T if domain.rank else x
    x.requires_grad_()
    for op in ("max", "sum"):
        out = domain.all_reduce(x, op)
        out.sum().backward()
        wanted = torch.arange(6.0).reshape(2, 3) * (op == "max")
        assert torch.equal(out.detach(), wanted)
    hit = torch.full((2, 3), 2.0 * domain.rank)
    hit[0, 0] = 1.0  # a tie
    assert torch.equal(x.grad, hit + 2)


def test_memory_layouts_may_differ_between_ranks(ranks):
    ranks[2].run(layouts_job)


def maximum_job():
    """Ties on several ranks share the gradient equally."""
    domain = init_domain()
    x = torch.tensor([1.0, float(domain.rank), -1.0], requires_grad=True)
    top = domain.all_reduce(x, "max")
    assert top.tolist() == [1.0, domain.size - 1.0, -1.0]
    top.sum().backward()
    return x.grad.tolist()


def test_ties_share_the_gradient_of_a_maximum(ranks):
    one, two, three = ranks[3].run(maximum_job)
    assert one == [1.0, 0.0, 1.0]
    assert two == [1.0, 0.0, 1.0]
    assert three == [1.0, 3.0, 1.0]  # three ranks, each with the gradient of its own copy


def replicate_job():
    domain = init_domain()
    speed = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    x = mine(domain, SIZES[domain.size])
    loss = domain.all_reduce((domain.replicate(speed) * x).square().sum())
    loss.backward()
    return speed.grad.item()


def test_a_replicated_leaf_gets_the_serial_gradient(ranks):
    expected = (4 * whole(SIZES[4]).square().sum()).item()
    assert ranks[4].run(replicate_job) == [pytest.approx(expected)] * 4


def average_job():
    domain = init_domain()
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)).double()
    domain.all_reduce(model[0](mine(domain, SIZES[domain.size])).sum()).backward()
    domain.average_gradients(model)
    assert model[1].weight.grad is None
    return model[0].weight.grad[0].tolist()


def test_gradients_without_ddp_are_averaged(ranks):
    expected = whole(SIZES[4]).sum(dim=0).tolist()
    for got in ranks[4].run(average_job):
        assert got == pytest.approx(expected)


def traffic_job():
    domain = init_domain()
    plan = ring_plan(domain)
    with count_traffic(domain) as traffic:
        x = torch.randn(4, 5, requires_grad=True)
        domain.exchange(x, plan).sum().backward()
        domain.all_reduce(torch.zeros(6))
    return {kind: tuple(count) for kind, count in traffic.counts.items()}


def test_traffic_is_counted(ranks):
    for counts in ranks[4].run(traffic_job):
        assert counts == {
            "exchange": (1, 4, 4 * 5 * 4), "accumulate": (1, 4, 4 * 5 * 4), "all_reduce": (1, 6, 24)
        }  # fmt: skip


def split_table_job():
    domain = init_domain()
    plan = ring_plan(domain)
    if domain.rank == 1:
        plan.receive = [n + 1 for n in plan.receive]
    domain.exchange(torch.zeros(4, 2), plan)


def test_counts_that_disagree_are_an_error_on_every_rank(ranks):
    for line in ranks[3].failures(split_table_job):
        assert "ring: rank 0 sends 2 rows to rank 1, which expects 3" in line


def raises_job():
    domain = init_domain()
    if domain.rank == 1:
        raise ValueError("my own mistake")
    domain.all_reduce(torch.zeros(3))


def late_job():
    domain = init_domain()
    if domain.rank == 0:
        time.sleep(6)
    domain.all_reduce(torch.zeros(3))


def dies_job():
    import os

    domain = init_domain()
    if domain.rank == 1:
        os._exit(3)
    domain.all_reduce(torch.zeros(3))


def other_dtype_job():
    domain = init_domain()
    domain.exchange(torch.zeros(4, 2, dtype=torch.float64 if domain.rank else torch.float32),
                    ring_plan(domain))  # fmt: skip


def test_a_rank_that_dies_is_named_by_the_others():
    errors = Ranks(2, timeout=3).failures(dies_job)
    assert errors[1] == "died"
    assert "rank 0 is in all_reduce(sum, (3,), torch.float32)" in errors[0]
    assert "but rank 1 has ended" in errors[0]


def test_rows_of_another_dtype_are_an_error_on_every_rank():
    for line in Ranks(2, timeout=3).failures(other_dtype_job):
        assert "ranks disagree on the rows of ring: rank 0 has (torch.float32, 2)" in line


@pytest.mark.slow
@pytest.mark.parametrize("job", [late_job, raises_job])
def test_all_ranks_end_with_a_message_if_one_raises_or_is_late(job):
    errors = Ranks(2, timeout=3).failures(job)
    assert any("rank 0 of 2: " in e or "rank 1 of 2: " in e for e in errors)
    assert all(errors)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: d.all_gather(torch.zeros(3), (4,)), "expected 4 rows on rank 0"),
        (lambda d: d.redistribute(torch.zeros(3), (3,), (4,)), r"\(3,\) cannot become \(4,\)"),
        (lambda d: d.all_gather(torch.zeros(3), (1, 2)), "got 2 sizes for 1 rank;"),
        (lambda d: d.redistribute(torch.zeros(3), (3,), (1, 2)), r"cannot become \(1, 2\)"),
        (
            lambda d: d.gather(torch.zeros(3), (3,), root=1),
            "root 1 is not a rank; ranks are 0 to 0",
        ),
        (lambda d: d.scatter(torch.zeros(0), (3,), root=-1), "root -1 is not a rank"),
        (
            lambda d: d.all_reduce(torch.zeros(3), "mean"),
            "op 'mean' is unknown; use 'sum' or 'max'",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(DomainError, match=message):
        call(init_domain())


def test_one_rank_needs_no_process_group():
    domain = init_domain()
    x = torch.randn(7, 2, requires_grad=True)
    assert torch.equal(domain.all_gather(x, (7,)), x)
    assert torch.equal(domain.redistribute(x, (7,), (7,)), x)
    assert domain.all_reduce(x) is x
    assert domain.share("a") == ["a"]
    plan = Exchange(domain, 7, torch.zeros(0, dtype=torch.int64), [0], [0])
    assert domain.exchange(x, plan) is x
    assert domain.traffic.total().calls == 0


def messages(failing):
    """The errors of `run_collectively` on three ranks, some of which fail for the same reason."""

    def job(domain):
        def action():
            if domain.rank in failing:
                raise MeshshardError("x: is not there")

        with pytest.raises(DomainError) as raised:
            domain.run_collectively(action, "load")
        return str(raised.value)

    return set(simulate(3, job))


def test_ranks_that_fail_for_the_same_reason_share_one_message():
    assert messages((0, 1, 2)) == {"load: all ranks: x: is not there"}
    assert messages((0, 2)) == {"load: ranks 0, 2: x: is not there"}
    assert messages((1,)) == {"load: rank 1: x: is not there"}


def test_the_error_of_a_single_rank_has_no_rank_number():
    def action():
        raise MeshshardError("x: is not there")

    with pytest.raises(DomainError, match=r"^load: x: is not there$"):
        init_domain().run_collectively(action, "load")


def test_torch_func_is_refused():
    domain = Domain()
    with pytest.raises(DomainError, match=r"torch.func .* use torch.autograd.grad"):
        torch.func.grad(lambda x: domain.all_gather(x, [3]).sum())(torch.ones(3))


def both_transports_job(domain=None):
    domain = domain or init_domain()
    sizes, wanted = SIZES[domain.size], WANTED[domain.size]
    x = mine(domain, sizes).clone().requires_grad_()
    with count_traffic(domain) as traffic:
        y = domain.redistribute(domain.all_reduce(x.sum()) * x, sizes, wanted)
        domain.all_gather(y, wanted).square().sum().backward()
    rows, received = domain.route(torch.arange(domain.size), [1] * domain.size)
    counts = {kind: tuple(count) for kind, count in traffic.counts.items()}
    return x.grad, (counts, domain.share(domain.rank), rows.tolist(), received)


def test_threads_and_process_groups_give_the_same_results(ranks):
    pairs = zip(simulate(4, both_transports_job), ranks[4].run(both_transports_job), strict=True)
    for (grad, others), (wanted, wanted_others) in pairs:
        assert torch.allclose(grad, wanted, rtol=1e-12)
        assert others == wanted_others


DIFFERENT_CALLS = {
    "an early end": (lambda d: d.rank or d.all_reduce(torch.ones(2)), "all_reduce"),
    "another kind": (
        lambda d: d.all_reduce(torch.ones(2)) if d.rank else d.share(1),
        r"rank 0 in gather_objects\(\) at .*, rank 1 in all_reduce\(sum, \(2,\), torch.float32\)",
    ),
    "another shape": (
        lambda d: d.all_reduce(torch.ones(2 + (d.rank == 2))),
        r"rank 0 in all_reduce\(sum, \(2,\), .*rank 2 in all_reduce\(sum, \(3,\)",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT_CALLS)
def test_simulated_ranks_in_different_collectives_raise(case):
    job, message = DIFFERENT_CALLS[case]
    with pytest.raises(DomainError, match=message):
        simulate(3, job)
