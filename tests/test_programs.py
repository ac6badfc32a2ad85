"""Random programs of torch operations are exact on simulated ranks, or refused alike by all."""

import pytest
from programs import draw_program, judge

pytestmark = pytest.mark.slow
EACH = 20  # programs of one test; benchmarks/programs.py runs thousands


@pytest.mark.parametrize("first", range(0, 200, EACH))
def test_programs(first):
    bad = {}
    for seed in range(first, first + EACH):
        program = draw_program(seed)
        kind, why = judge(program)
        if kind not in ("exact", "refused"):
            bad[str(program)] = f"{kind}: {why}"
    assert not bad


def test_a_seed_is_one_program():
    assert str(draw_program(3)) == str(draw_program(3))
