"""Makes the pages that follow the code and the data. Called by conf.py, in a few seconds.

generated/cli.md         the help of every command, from argparse
generated/api.md         one section a module, for autodoc
generated/rules.md       functions that work on sharded tensors, from the tables of rules
generated/benchmarks.md  tables of benchmarks/results/*.json
generated/probes.md      the probe matrix: what every operation does on shards, in three libraries
datasets/, notebooks/    copies, so that their links work inside the documentation
"""

import argparse
import importlib
import importlib.util
import json
import pkgutil
import shutil
import tomllib
from pathlib import Path

import meshshard

ROOT = Path(__file__).parent.parent
PROBES = "probe_matrix.json"  # long tables: a page of its own


def everything(docs: Path) -> None:
    """Write all generated pages below the documentation's folder."""
    target = docs / "generated"
    target.mkdir(exist_ok=True)
    write(target / "cli.md", cli_page())
    write(target / "api.md", api_page())
    write(target / "rules.md", rules_page())
    write(target / "benchmarks.md", benchmarks_page(ROOT / "benchmarks" / "results"))
    write(target / "probes.md", probes_page(ROOT / "benchmarks" / "results" / PROBES))
    copy_all(ROOT / "datasets", docs / "datasets", "*.md")
    copy_all(ROOT / "notebooks", docs / "notebooks", "*.ipynb")
    write(target / "notebooks.md", notebooks_page(docs / "notebooks"))


def version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def write(path: Path, text: str) -> None:
    """Write a page if it changed, so that Sphinx rebuilds only what it must."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def copy_all(source: Path, target: Path, pattern: str) -> None:
    shutil.rmtree(target, ignore_errors=True)
    for file in sorted(source.rglob(pattern)):
        if ".ipynb_checkpoints" in file.parts:
            continue
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)


def notebooks_page(notebooks: Path) -> str:
    names = [f"/notebooks/{file.stem}" for file in sorted(notebooks.glob("*.ipynb"))]
    head = (
        "# Notebooks\n\nEach runs from a clone alone, on data that is in the repository, and "
        "checks one physical number at its end.\n"
    )
    if not names:
        return head + "\nThere is none in this checkout yet.\n"
    return head + "\n".join(["\n```{toctree}", ":maxdepth: 1", "", *names, "```\n"])


# ------------------------------------------------------------------------------------ command line
def cli_page() -> str:
    """Help of the program and of its commands; one hook: meshshard.cli.build_parser()."""
    if importlib.util.find_spec("meshshard.cli") is None:
        return "# Command line\n\nThe command line is not part of this checkout yet.\n"
    parser = importlib.import_module("meshshard.cli").build_parser()
    parts = ["# Command line\n", "Made from the program's own help.\n", fenced(parser)]
    for name, command in subcommands(parser).items():
        parts += [f"\n## meshshard {name}\n", fenced(command)]
    return "\n".join(parts)


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return {
        name: command
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, command in action.choices.items()
    }


def fenced(parser: argparse.ArgumentParser) -> str:
    parser.formatter_class = wide(parser.formatter_class)
    return f"```text\n{parser.format_help().rstrip()}\n```\n"


def wide(formatter: type) -> type:
    """The same formatter at a fixed width: the page must not depend on the terminal."""

    class Wide(formatter):
        def __init__(self, prog: str, **settings: object) -> None:
            super().__init__(prog, **{**settings, "width": 96})

    return Wide


# ------------------------------------------------------------------------------------------ Python
def api_page() -> str:
    """A section for each public module; autodoc fills it."""
    names = [
        module.name
        for module in pkgutil.walk_packages(meshshard.__path__, "meshshard.")
        if not any(part.startswith("_") for part in module.name.split("."))
    ]
    head = "# Python reference\n\n" + directive("meshshard", members=False)
    return head + "".join(f"\n## {name}\n\n" + directive(name) for name in names)


def directive(module: str, members: bool = True) -> str:
    own = ", ".join(own_names(module)) if members else ""
    options = f"   :members: {own}\n   :show-inheritance:\n" if own else ""
    return f"```{{eval-rst}}\n.. automodule:: {module}\n{options}```\n"


def own_names(module: str) -> list[str]:
    """Public names that no other section has: those of the module itself, or of private ones."""
    loaded = importlib.import_module(module)
    homes = {n: getattr(getattr(loaded, n), "__module__", module) for n in loaded.__all__}
    return [n for n, home in homes.items() if home == module or "._" in (home or "")]


def keep_drawings(app, what, name, obj, options, lines: list[str]) -> None:
    """Trees drawn in a docstring keep their lines: mark the indented block as literal."""
    drawn = next((i for i, line in enumerate(lines) if "├" in line), None)
    if drawn is None:
        return
    start = drawn
    while start > 0 and lines[start - 1].startswith(" "):
        start -= 1
    lines[start:start] = ["::", ""]


def skip_tuple_fields(app, what, name, obj, skip, options) -> bool | None:
    """Fields of a NamedTuple are described in its Attributes."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field") else None


# ------------------------------------------------------------------------------------------- rules
def rules_page() -> str:
    """Every torch function that has a rule, by family."""
    tensor = importlib.import_module("meshshard.tensor")
    names = importlib.import_module("meshshard.tensor.shard_tensor").name_of
    head = (
        "# Functions with a rule\n\nMade from the tables in `meshshard/tensor/rules`. A function "
        "that is not here is refused by name when it meets a sharded tensor.\n"
    )
    for family, rules in tensor.FAMILIES.items():
        module = importlib.import_module(f"meshshard.tensor.rules.{family}")
        listed = sorted({names(func) for func in rules})
        head += f"\n## {family}\n\n{module.__doc__.splitlines()[0]}\n\n"
        head += ", ".join(f"`{name}`" for name in listed) + "\n"
    return head


# -------------------------------------------------------------------------------------- benchmarks
def benchmarks_page(results: Path) -> str:
    """Every JSON file of results as tables, in the order of their names."""
    head = (
        "# Measurements\n\n"
        "Each script of `benchmarks/` prints ratios measured in one run and writes the numbers "
        "below. Compare within a table; seconds of different machines say little.\n"
    )
    files = sorted(results.glob("*.json")) if results.is_dir() else []
    files = [file for file in files if file.name != PROBES]
    if not files:
        return head + "\nNo results are stored in this checkout yet.\n"
    return head + "".join(section(f.stem, json.loads(f.read_text()), level=2) for f in files)


def probes_page(results: Path) -> str:
    """Counts, the table of all operations, and why those that are not exact are not."""
    head = (
        "# What operations do on shards\n\n"
        "`benchmarks/probe_matrix.py` runs every operation below on rows that are divided over 2 "
        "and 4 ranks, and compares values and the gradients of all inputs with the same operation "
        "on the whole tensor, in float64, under a loss that weights every number differently. "
        "Sizes are uneven (3 and 11 rows), those of a METIS partition, and with empty shards; a "
        "cell is the worst outcome on 2 and 4 ranks.\n\n"
        "- **exact**: values and gradients equal the whole's to 1e-10.\n"
        "- **single**: they do to 1e-6, which is single precision.\n"
        "- **refused**: every rank raises at once; meshshard's reason is always a `NoShardRule`.\n"
        "- **crash**: a rank dies or hangs, or some ranks raise and others do not.\n"
        "- **WRONG**: no error, and other numbers.\n\n"
        "torch's DTensor knows only the sizes that `torch.chunk` makes. It gets these rows by "
        "`from_local(..., run_check=False)` with the true global shape, parameters replicated and "
        "plain tensors under `implicit_replication`; PhysicsNeMo's ShardTensor is told the shapes "
        "of all shards.\n"
    )
    if not results.exists():
        return head + "\nNo results are stored in this checkout yet.\n"
    found = json.loads(results.read_text())
    return head + "".join(section(k, v, level=2) for k, v in found.items())


def section(title: str, value: object, level: int) -> str:
    """A heading, then: a list of records as one table, a dictionary as a table and sections."""
    text = f"\n{'#' * min(level, 6)} {title}\n"
    if is_records(value):
        return text + table(list(dict.fromkeys(k for row in value for k in row)), value)
    if not isinstance(value, dict):
        value = {"value": value}
    plain = {k: v for k, v in value.items() if not is_records(v) and not is_nested(v)}
    if plain:
        text += table(
            ["quantity", "value"], [{"quantity": k, "value": v} for k, v in plain.items()]
        )
    return text + "".join(section(k, v, level + 1) for k, v in value.items() if k not in plain)


def is_records(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def is_nested(value: object) -> bool:
    return isinstance(value, dict) and bool(value)


def table(columns: list[str], rows: list[dict[str, object]]) -> str:
    lines = [columns, ["---"] * len(columns)]
    lines += [[cell(row.get(column, "")) for column in columns] for row in rows]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
