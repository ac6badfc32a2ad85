"""The page about layers: its examples run as they stand, on one rank and on two."""

import contextlib
import re
from pathlib import Path

import pytest

from meshshard import io
from meshshard.partitioning.partition import partition

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "layers.md"
MADE = ("same", "out", "found", "mean", "far", "grid", "back", "at_cells", "at_points")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("page")
    mesh = io.read(ROOT / "datasets/ahmed/run_8/boundary_8.vtp")
    partition(mesh, 4).save(place / "shards/boundary_8.shards")
    return place


def page_job(folder):
    """Run all blocks in one namespace, and return what they made, whole."""
    names = {"__name__": "page"}
    with contextlib.chdir(folder):
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
            exec(compile(block, "layers.md", "exec"), names)
    kept = {n: names[n].detach() for n in MADE}
    whole = {n: x.gather() if hasattr(x, "sharding") else x for n, x in kept.items()}
    return {n: x.numpy() for n, x in whole.items()}


def test_the_page_says_what_the_check_of_a_convolution_prints(folder, capsys):
    page_job(folder)
    said = re.search(r"check_conv\(.*\) +# (.*)", PAGE.read_text("utf-8"))
    assert capsys.readouterr().out == f"{said[1]}\n"


def test_the_examples_are_the_same_on_two_ranks(ranks, folder):
    one = page_job(folder)
    for two in ranks[2].run(page_job, folder):
        for name, rows in one.items():
            assert two[name].shape == rows.shape
            assert abs(two[name] - rows).max() <= 1e-5 * abs(rows).max(), name
