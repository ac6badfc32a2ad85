"""Generate the pages that are made from code and data. Called by conf.py; takes a few seconds.

generated/cli.md         the help of every command, from argparse
generated/api/           one page for each public module, for autodoc
generated/rules.md       functions that work on sharded tensors, from the tables of rules
generated/pyg.md         classes of PyG, from the table in nn/conv/pyg.py
generated/*_table.md     file formats and partitioning methods, included by other pages
generated/benchmarks.md  questions of measurements.py, answered by benchmarks/results/*.json
generated/probes.md      the probe matrix: what every operation does on shards, in three libraries
generated/operators.md   PyTorch's operator database: what every operation does on shards
datasets/, notebooks/    copies, so that their links work inside the documentation
"""

import argparse
import importlib
import importlib.util
import inspect
import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PROBES, OPERATORS = "probe_matrix.json", "op_database.json"  # long tables, on separate pages
# Pages of the Python reference in the order of the story, and the modules that each adds.
API = {
    "meshshard": (),
    "meshshard.mesh": ("meshshard.mesh.inspection",),
    "meshshard.io": (),
    "meshshard.graph": ("meshshard.graph.plan",),
    "meshshard.store": (),
    "meshshard.viz": (),
    "meshshard.partitioning": ("meshshard.partitioning.quality", "meshshard.partitioning.explorer"),
    "meshshard.comm": (),
    "meshshard.tensor": (),
    "meshshard.ranks": ("meshshard.ranks.shard", "meshshard.ranks.launch"),
    "meshshard.nn": (),
    "meshshard.models": (),
    "meshshard.errors": (),
}


def everything(docs: Path) -> None:
    """Write all generated pages below the documentation's folder."""
    target = docs / "generated"
    target.mkdir(exist_ok=True)
    write(target / "cli.md", cli_page())
    (target / "api").mkdir(exist_ok=True)
    for name, text in api_pages().items():
        write(target / "api" / name, text)
    write(target / "rules.md", rules_page())
    write(target / "pyg.md", pyg_page())
    write(target / "formats_table.md", formats_table())
    write(target / "methods_table.md", methods_table())
    write(target / "benchmarks.md", benchmarks_page(ROOT / "benchmarks" / "results"))
    write(target / "probes.md", probes_page(ROOT / "benchmarks" / "results" / PROBES))
    write(target / "operators.md", operators_page(ROOT / "benchmarks" / "results" / OPERATORS))
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
        "# Notebooks\n\nEach notebook runs in a clone, on data of the repository, and ends with a "
        "check of one physical quantity.\n"
    )
    if not names:
        return head + "\nThis checkout has none.\n"
    return head + "\n".join(["\n```{toctree}", ":maxdepth: 1", "", *names, "```\n"])


# ------------------------------------------------------------------------------------ command line
def cli_page() -> str:
    """Help of the program and of its commands; one hook: meshshard.cli.build_parser()."""
    if importlib.util.find_spec("meshshard.cli") is None:
        return "# Command line\n\nThe command line is not part of this checkout yet.\n"
    parser = importlib.import_module("meshshard.cli").build_parser()
    parts = ["# Command line\n", "The help texts of all commands.\n", fenced(parser)]
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
def api_pages() -> dict[str, str]:
    """An index and one page for each public module, by file name; autodoc fills them."""
    index = "# Python reference\n\nOne page for each module, from data to models.\n\n"
    index += "```{toctree}\n"
    pages = {"index.md": index + ":maxdepth: 1\n\n" + "\n".join(API) + "\n```\n"}
    documented: set[str] = set()
    for module, others in API.items():
        text = f"# {module}\n\n" + directive(module, documented)
        for other in others:
            text += f"\n## {other}\n\n" + directive(other, documented)
        pages[f"{module}.md"] = text
    return pages


def directive(module: str, documented: set[str]) -> str:
    """An automodule directive with the public names that no earlier page has."""
    loaded = importlib.import_module(module)
    names = [] if module == "meshshard" else [n for n in loaded.__all__ if is_object(loaded, n)]
    named = {n: home_of(loaded, n) for n in names}
    shown = [n for n in names if named[n] not in documented]
    documented.update(named.values())
    options = f"   :members: {', '.join(shown)}\n   :show-inheritance:\n" if shown else ""
    return f"```{{eval-rst}}\n.. automodule:: {module}\n{options}```\n"


def is_object(module: object, name: str) -> bool:
    """Whether a name is a class, function or exception of this package."""
    return str(getattr(getattr(module, name), "__module__", "")).startswith("meshshard")


def home_of(module: object, name: str) -> str:
    """Full name of an object where it is defined."""
    thing = getattr(module, name)
    return f"{thing.__module__}.{thing.__qualname__}"


def keep_drawings(app, what, name, obj, options, lines: list[str]) -> None:
    """Trees drawn in a docstring keep their lines: mark the indented block as literal."""
    drawn = next((i for i, line in enumerate(lines) if "├" in line), None)
    if drawn is None:
        return
    start = drawn
    while start > 0 and lines[start - 1].startswith(" "):
        start -= 1
    lines[start:start] = ["::", ""]


def add_parameters(app, what, name, obj, options, lines: list[str]) -> None:
    """Describe the parameters of a class where `__init__` documents them."""
    init = vars(obj).get("__init__") if what == "class" else None
    if init is not None and init.__doc__:
        lines += ["", *inspect.getdoc(init).splitlines()[1:], ""]


def skip_tuple_fields(app, what, name, obj, skip, options) -> bool | None:
    """Fields of a NamedTuple are described in its Attributes."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field") else None


# ------------------------------------------------------------------------------------------- rules
def rules_page() -> str:
    """Every torch function that has a rule, by family."""
    tensor = importlib.import_module("meshshard.tensor")
    names = importlib.import_module("meshshard.tensor.shard_tensor").name_of
    head = (
        "# Functions with a rule\n\nThe torch functions that work on sharded tensors, made from "
        "the tables in `meshshard/tensor/rules`. Any other function raises `NoShardRule`.\n"
    )
    for family, rules in tensor.FAMILIES.items():
        module = importlib.import_module(f"meshshard.tensor.rules.{family}")
        listed = sorted({names(func) for func in rules})
        head += f"\n## {family}\n\n{module.__doc__.splitlines()[0]}\n\n"
        head += ", ".join(f"`{name}`" for name in listed) + "\n"
    return head


# ------------------------------------------------------------------------------- tables of the code
def pyg_page() -> str:
    """Every known class of PyG, by kind."""
    classes = importlib.import_module("meshshard.nn.conv.pyg").CLASSES
    text = (
        "# Classes of PyG\n\nWhat `meshshard.nn.convert` does with each class, made from the table "
        "in `meshshard/nn/conv/pyg.py`. A convolution that is not listed gets two hops. "
        "A user-defined one gets two hops too, and is checked at its first call.\n"
    )
    for kind in dict.fromkeys(row.kind for row in classes.values()):
        rows = [pyg_row(name, row) for name, row in classes.items() if row.kind == kind]
        columns = [c for c in rows[0] if any(row[c] for row in rows)]
        text += f"\n## {kind.capitalize()}s\n" + table(columns, rows)
    return text


def pyg_row(name: str, row: object) -> dict[str, object]:
    hops = "" if row.refused or row.kind != "convolution" else str(row.hops)
    if row.one_hop_without:
        hops += f" (1 with `{row.one_hop_without}=False`)"
    return {
        "class": f"`{name}`",
        "hops": hops,
        "fast path": "yes" if row.fast_path else "",
        "refused": row.refused,
        "refused in a convolution": row.refused_in_conv,
        "refused as a readout": row.refused_as_readout,
    }


def formats_table() -> str:
    """The file formats, for docs/formats.md."""
    rows = [
        {
            "format": row.name,
            "suffixes": " ".join(f"`.{suffix}`" for suffix in row.suffixes),
            "read by": "child process" if row.in_child else "meshshard",
            "notes": row.note,
        }
        for row in importlib.import_module("meshshard.io.formats").FORMATS
    ]
    return table(list(rows[0]), rows).lstrip()


def methods_table() -> str:
    """The partitioning methods, for docs/choosing.md."""
    rows = [
        {
            "method": f"`{name}`",
            "what it does": row.help,
            "options": " ".join(f"`{option}`" for option in row.options),
        }
        for name, row in importlib.import_module("meshshard.partitioning.methods").METHODS.items()
    ]
    return table(list(rows[0]), rows).lstrip()


# -------------------------------------------------------------------------------------- benchmarks
def benchmarks_page(results: Path) -> str:
    """The questions of measurements.py with their tables and answers."""
    chapters = importlib.import_module("measurements").CHAPTERS
    text = "# Measurements\n\n" + machine_of(results)
    for chapter, questions in chapters.items():
        text += f"\n## {chapter}\n"
        for question in questions:
            text += answered(
                question, json.loads((results / f"{question.results}.json").read_text())
            )
    return text


def machine_of(results: Path) -> str:
    """One paragraph about the machine, with its packages."""
    machine = json.loads((results / "tensor.json").read_text())["machine"]
    packages = ", ".join(f"{k} {v}" for k, v in machine.items() if k not in ("system", "cores"))
    return (
        f"All numbers were measured on one machine with {machine['cores']} cores "
        f"({machine['system']}; {packages}), on CPUs, with gloo. Each table comes from one run of "
        "a script in `benchmarks/`: compare within a table, because times depend on the machine. "
        "A ratio below 1 means that meshshard needs less. The scripts write all their numbers to "
        "`benchmarks/results/*.json`.\n"
    )


def written_out(value: object) -> object:
    """A text of the JSON files without its abbreviations."""
    if isinstance(value, str):
        for short, long in importlib.import_module("measurements").WORDS.items():
            value = value.replace(short, long)
    return value


def answered(question: object, found: dict[str, dict[str, list[dict[str, object]]]]) -> str:
    """Question, table and answer."""
    tables = found[question.section]
    rows = tables[next(title for title in tables if title.startswith(question.title))]
    rows = [row for row in rows if question.rows in str(row.get("what", ""))]
    shown = [
        {new: written_out(row.get(old, "")) for old, new in question.columns.items()}
        for row in rows
    ]
    head, _, setting = question.text.partition("? ")
    text = f"\n### {head.rstrip('?')}?\n" + (f"\n{setting}\n" if setting else "")
    return text + table(list(question.columns.values()), shown) + f"\n{question.answer(rows)}\n"


def probes_page(results: Path) -> str:
    """Counts, the table of all operations, and why those that are not exact are not."""
    head = (
        "# What operations do on shards\n\n"
        "`benchmarks/probe_matrix.py` runs every operation below on rows divided over 2 "
        "and 4 ranks, and compares values and the gradients of all inputs with the same operation "
        "on the whole tensor, in float64, under a loss that weights every number differently. "
        "Sizes are uneven (3 and 11 rows), those of a METIS partition, and with empty shards; a "
        "cell is the worst outcome on 2 and 4 ranks.\n\n"
        "- **exact**: values and gradients equal those of the whole tensor to 1e-10.\n"
        "- **single**: values and gradients agree to 1e-6 only, which is single precision.\n"
        "- **refused**: every rank raises at once; meshshard's reason is always a `NoShardRule`.\n"
        "- **crash**: a rank dies or hangs, or some ranks raise and others do not.\n"
        "- **WRONG**: no error, but different numbers.\n\n"
        "torch's DTensor supports only the sizes of `torch.chunk`. It gets these rows by "
        "`from_local(..., run_check=False)` with the true global shape, parameters replicated and "
        "plain tensors under `implicit_replication`; PhysicsNeMo's ShardTensor gets the shapes "
        "of all shards.\n"
    )
    if not results.exists():
        return head + "\nThis checkout has no stored results.\n"
    found = json.loads(results.read_text())
    return head + "".join(section(k, v, level=2) for k, v in found.items())


def operators_page(results: Path) -> str:
    """Counts of each suite, then every operation that is not exact in all shardings, and why."""
    found = json.loads(results.read_text())
    text = (
        "# PyTorch's operator database\n\n"
        "`benchmarks/op_database.py` takes the samples that PyTorch tests its own operations with, "
        "shards them in every way (each dim; the first input, all inputs of that size, each other "
        "input) over three ranks with uneven and empty shards, and compares values, dtypes, shapes "
        f"and all gradients with one process: here {samples_of(found)}. "
        "Where numbers are drawn (random operations, dropout), only shapes and dtypes are "
        "compared. Functions, methods, in-place variants and inputs with unusual strides are "
        "called.\n\n"
        "- **exact**: equal in all calls.\n"
        "- **partly**: exact in some calls, in the others refused by name on every rank.\n"
        "- **refused**: `NoShardRule` in all calls.\n\n"
        "*Wrong arguments* are calls that one process refuses. There *exact* means that every rank "
        "raises, and no other outcome than *exact* or *refused* is right.\n"
    )
    suites = {name: as_list(verdicts) for name, verdicts in found.items() if as_list(verdicts)}
    kinds = ("exact", "partly", "refused", "wrong", "diverged", "error")
    rows = []
    for suite, verdicts in suites.items():
        words = [word_of(v["counts"]) for v in verdicts]
        calls = sum(sum(v["counts"].values()) for v in verdicts)
        counts = {k: words.count(k) for k in kinds}
        rows.append({"suite": suite, "entries": len(words), "calls": calls} | counts)
    text += table(list(rows[0]), rows)
    first = rows[0]
    some = first["exact"] + first["partly"]
    text += (
        f"\n{100 * first['exact'] / first['entries']:.0f} % of the operations are exact in all "
        f"shardings, {100 * some / first['entries']:.0f} % in at least one. For comparison, "
        "DTensor passes 522 of 677 operations (77 %) by the list of expected "
        "failures in PyTorch 2.13's own tests, on even shards, without comparing gradients.\n"
    )
    for suite, verdicts in suites.items():
        if suite == "wrong arguments":
            continue
        listed = [v for v in verdicts if word_of(v["counts"]) != "exact"]
        text += f"\n## {suite.capitalize()} that are not exact in all shardings\n"
        text += table(["operation", "outcome", "calls", "refused because"], [
            {
                "operation": f"`{v['name']}`", "outcome": word_of(v["counts"]),
                "calls": ", ".join(f"{n} {k}" for k, n in v["counts"].items()),
                "refused because": reason_of(v["examples"].get("refused", "")),
            }
            for v in listed
        ])  # fmt: skip
    return text


def as_list(value: Any) -> list[Any]:
    """The verdicts of a suite; nothing for the settings of the run."""
    return value if isinstance(value, list) else []


def samples_of(found: dict[str, Any]) -> str:
    """How many samples of the database were taken."""
    if found["samples"]:
        return f"the first {found['samples']} samples of each operation"
    cut = [v["name"] for k in found for v in as_list(found[k]) if not v["complete"]]
    if not cut:
        return "all samples"
    names = ", ".join(f"`{name}`" for name in cut)
    return f"all samples, but as many as {found['seconds']:.0f} s allow of {names}"


def word_of(counts: dict[str, int]) -> str:
    """The outcome of an operation, from the outcomes of its calls."""
    for bad in ("error", "diverged", "wrong"):
        if counts.get(bad):
            return bad
    if not counts.get("refused"):
        return "exact"
    return "partly" if counts.get("exact") else "refused"


def reason_of(example: str) -> str:
    """The reason in the message of a `NoShardRule`."""
    found = re.search(r"has no exact rule for [a-z ]+ \((.*?)\)(: got|; use)", example)
    return found[1] if found else "no rule" if example else ""


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
    text = number(value) if isinstance(value, (int, float)) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def number(value: float) -> str:
    """Three digits, and commas in whole numbers."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
