"""Settings that all tests share."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings
from ranks import Ranks
from samples import cut, surface

# Shared and slow machines: time is pytest-timeout's business, not that of one example.
settings.register_profile("house", deadline=None, print_blob=True)
settings.register_profile("ci", parent=settings.get_profile("house"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "house")

if not os.environ.get("DISPLAY"):  # spares a line about a missing X server for each picture
    os.environ.setdefault("VTK_DEFAULT_OPENGL_WINDOW", "vtkEGLRenderWindow")


@pytest.fixture(scope="session")
def ranks():
    """Pools of forked gloo ranks, by their number."""
    pools = {size: Ranks(size) for size in (2, 3, 4)}
    yield pools
    for pool in pools.values():
        pool.stop()


@pytest.fixture(scope="session")
def stored(tmp_path_factory):
    """A surface in three shards, which tests do not change."""
    return cut(surface(), 3).save(tmp_path_factory.mktemp("stored") / "x.shards")


@pytest.fixture
def folder(stored, tmp_path):
    """A copy of it, which a test may change."""
    return Path(shutil.copytree(stored, tmp_path / "x.shards"))


def pytest_collection_modifyitems(items):
    """Mark tests on 3 and 4 ranks as slow; the same tests on 1 and 2 ranks are not."""
    for item in items:
        if "ranks" in item.fixturenames and hasattr(item, "callspec"):
            sizes = (item.callspec.params.get(name, 0) for name in ("size", "ranks_"))
            if max(sizes) > 2:
                item.add_marker(pytest.mark.slow)
