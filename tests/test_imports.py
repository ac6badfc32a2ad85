"""What imports load, and that every public name exists."""

import importlib
import json
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import meshshard

HEAVY = ("torch", "torch_geometric", "pyvista", "vtk", "vtkmodules", "scipy", "pymetis", "tqdm")
TORCH_PART = ("comm", "forecast", "models", "nn", "ranks", "tensor", "train")
TORCH_NAMES = tuple(f"meshshard.{name}" for name in TORCH_PART)
MODULES = ["meshshard"] + [
    module.name
    for module in pkgutil.walk_packages(meshshard.__path__, "meshshard.")
    if not module.name.endswith("__main__")
]


def loaded_by(*modules: str) -> set[str]:
    """Heavy packages that a new process has loaded after importing these modules."""
    code = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_import_meshshard_loads_only_numpy() -> None:
    assert loaded_by("meshshard") == set()


def test_modules_below_comm_never_load_torch() -> None:
    below = [name for name in MODULES if not name.startswith(TORCH_NAMES)]
    assert loaded_by(*below).isdisjoint({"torch", "torch_geometric"})


def test_the_command_line_loads_only_numpy() -> None:
    assert loaded_by("meshshard.cli", "meshshard.mesh") == set()
    code = (
        "import sys; from meshshard.cli import build_parser; build_parser().format_help()\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_dir_lists_the_public_names_and_modules() -> None:
    listed = dir(meshshard)
    modules = {"mesh", "io", "graph", "store", "viz", "partitioning", "comm", "tensor", "ranks",
               "nn", "models"}  # fmt: skip
    assert set(listed) == {*meshshard.__all__, *modules, "__version__"}
    assert all(getattr(meshshard, name) is not None for name in listed)
    assert meshshard.nn is importlib.import_module("meshshard.nn")
    with pytest.raises(AttributeError, match="has no attribute 'partitions'"):
        _ = meshshard.partitions


def test_names_that_modules_list_exist() -> None:
    for name in dir(meshshard):
        value = getattr(meshshard, name)
        if isinstance(value, ModuleType):
            assert not [item for item in value.__all__ if not hasattr(value, item)], name
