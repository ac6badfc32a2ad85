"""The budgets and the one-place rules of CONTRIBUTING.md, read off the source text."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshshard

PACKAGE = Path(meshshard.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 60  # without its docstring
PARAMETERS = 7
NESTING = 3

ONE_PLACE = {
    "pymetis": ("metis_child.py",),
    "vtk": ("io/", "viz/", "partitioning/pyvista_accessor.py"),
    "vtkmodules": ("io/", "viz/", "partitioning/pyvista_accessor.py"),
    "pyvista": ("io/", "viz/", "partitioning/pyvista_accessor.py"),
    "torch.distributed": ("comm.py", "comm/", "train.py", "train/"),
}
TORCH_PART = ("comm", "forecast", "models", "nn", "ranks", "tensor", "train")
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
Function = ast.FunctionDef | ast.AsyncFunctionDef

each_file = pytest.mark.parametrize(
    "path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES]
)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def lines(function: Function) -> int:
    """Lines of code, decorators and docstring not counted."""
    doc = ast.get_docstring(function, clean=False)
    return function.end_lineno - function.lineno + 1 - (doc.count("\n") + 1 if doc else 0)


def parameters(function: Function) -> int:
    given = [
        a.arg
        for a in function.args.posonlyargs + function.args.args + function.args.kwonlyargs
        if a.arg not in ("self", "cls")
    ]
    return len(given)


def nesting(node: ast.AST, level: int = 0) -> int:
    """Deepest block inside a node; `elif` stays on the level of its `if`."""
    deepest = level
    for child in ast.iter_child_nodes(node):
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deeper = level + (isinstance(child, BLOCKS) and not is_elif)
        deepest = max(deepest, nesting(child, deeper))
    return deepest


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of everything imported in a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_module_level(node: ast.AST) -> Iterator[ast.AST]:
    """Statements that run on import: not those in functions or under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not isinstance(child, Function) and not typing_only:
            yield child
            yield from at_module_level(child)


def public_definitions(body: list[ast.stmt]) -> Iterator[Function | ast.ClassDef]:
    """Public functions and classes of a body, and the public methods of these classes."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body)


def is_within(path: Path, places: tuple[str, ...]) -> bool:
    return path.relative_to(PACKAGE).as_posix().startswith(places)


def is_package(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@each_file
def test_a_file_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES_OF_A_FILE


@each_file
def test_functions_are_short_flat_and_have_few_parameters(path: Path) -> None:
    over = [
        f"{f.name} (line {f.lineno}): {what} {number}, at most {budget}"
        for f in functions(parse(path))
        for what, number, budget in (
            ("lines", lines(f), LINES_OF_A_FUNCTION),
            ("parameters", parameters(f), PARAMETERS),
            ("nesting", nesting(f), NESTING),
        )
        if number > budget
    ]
    assert not over, "\n".join(over)


@each_file
def test_what_is_public_has_a_docstring(path: Path) -> None:
    tree = parse(path)
    assert ast.get_docstring(tree), "the module has none"
    bare = [node.name for node in public_definitions(tree.body) if not ast.get_docstring(node)]
    assert not bare


@each_file
def test_heavy_packages_have_one_place(path: Path) -> None:
    strays = [
        f"{name} belongs in {', '.join(places)}"
        for name in set(imports(parse(path)))
        for package, places in ONE_PLACE.items()
        if is_package(name, package) and not is_within(path, places)
    ]
    assert not strays


@each_file
def test_the_numpy_floor_starts_without_torch(path: Path) -> None:
    started = {
        name
        for node in at_module_level(parse(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in imports(ast.Module([node], []))
    }
    heavy = [n for n in started if is_package(n, "torch") or is_package(n, "torch_geometric")]
    assert is_within(path, TORCH_PART) or not heavy


@each_file
def test_the_library_does_not_print(path: Path) -> None:
    calls = [
        node.lineno
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert path.parent.name == "cli" or not calls


def test_there_is_no_drawer_for_everything() -> None:
    assert not [p for p in FILES if p.stem in {"utils", "util", "helpers", "misc", "common"}]


def test_the_measures_measure() -> None:
    tree = ast.parse(
        "def f(self, a, *, b):\n"
        '    """One.\n\n    Two.\n    """\n'
        "    if a:\n"
        "        for x in b:\n"
        "            print(x)\n"
        "    elif b:\n"
        "        pass\n"
    )
    (f,) = functions(tree)
    assert (lines(f), parameters(f), nesting(f)) == (6, 2, 2)
    assert set(imports(ast.parse("from torch import distributed as d"))) == {
        "torch",
        "torch.distributed",
    }
