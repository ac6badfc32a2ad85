"""Pages, pictures and examples agree with the code."""

import contextlib
import doctest
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

import meshshard as ms

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# The ten names of docs/names.md, where they are defined.
NAMES = {
    "read": "meshshard.io.files",
    "partition": "meshshard.partitioning.partition",
    "Partition.save": "meshshard.partitioning.partition",
    "init_domain": "meshshard.comm.domain",
    "load": "meshshard.ranks.shard",
    "ShardTensor": "meshshard.tensor.shard_tensor",
    "convert": "meshshard.nn.conv.convert",
    "knn_graph": "meshshard.nn.points.knn",
    "Transolver": "meshshard.models.transolver",
    "Shard.gather": "meshshard.ranks.shard",
}


def script(name):
    """A Python file of the documentation, as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder with the data of the repository and the shards that the examples load."""
    place = tmp_path_factory.mktemp("clone")
    (place / "datasets").symlink_to(ROOT / "datasets")
    ms.partition(place / "datasets/ahmed/run_8/boundary_8.vtp", 4).save(place / "boundary_8.shards")
    return place


def test_the_picture_of_the_imports_is_up_to_date():
    house = script("draw_house")
    assert house.PICTURE.read_text(encoding="utf-8") == house.draw(), "run docs/draw_house.py"


@pytest.mark.parametrize("name", NAMES)
def test_docstring_examples_of_the_main_names(name, clone):
    module = importlib.import_module(NAMES[name])
    thing = module
    for part in name.split("."):
        thing = getattr(thing, part)
    (found,) = doctest.DocTestFinder(recurse=False).find(thing, name, module, vars(module).copy())
    assert found.examples
    with contextlib.chdir(clone):
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        assert runner.run(found).failed == 0


def test_the_page_of_the_main_names(clone):
    text = (DOCS / "names.md").read_text("utf-8")
    assert [head.split(".")[-1] for head in re.findall(r"^## (.*)", text, re.MULTILINE)] == [
        name.split(".")[-1] for name in NAMES
    ]
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    code = "".join(blocks).replace("parts.plot()\n", "").replace("boundary_8.shards", "new.shards")
    with contextlib.chdir(clone):
        exec(compile(code, "names.md", "exec"), {"__name__": "names"})
        assert Path("result.vtp").exists()


def test_the_reference_has_every_public_module_and_name():
    api = script("generate").API
    modules = {f"meshshard.{home}" for home in ms._HOMES if "." not in home}
    assert modules <= set(api)
    pages = "".join(script("generate").api_pages().values())
    for module in map(importlib.import_module, modules):
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                assert re.search(rf"[ ,]{name}[,\n]", pages), name


def test_every_question_about_a_benchmark_has_its_table():
    measurements, generate = script("measurements"), script("generate")
    page = generate.benchmarks_page(ROOT / "benchmarks" / "results")
    questions = [q for chapter in measurements.CHAPTERS.values() for q in chapter]
    assert page.count("\n### ") == len(questions)


def test_the_glossary_lists_each_term_once():
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    table = text.split("<!-- glossary -->")[1].split("<!-- end of glossary -->")[0]
    terms = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)[2:]
    assert len(terms) == len(set(terms)) > 20
