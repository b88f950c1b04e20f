"""Figures of the code base: how long its files and functions are, and where imports go in cycles.

Also which modules are small and have one importer, and which private functions are used once: both
may belong to where they are used.

python tools/house.py
python tools/house.py FOLDER_OF_A_PACKAGE
"""

import ast
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import resolve_name
from pathlib import Path
from typing import Literal, TypeGuard

LONG = 40
SMALL = 80
ROOT = Path(__file__).parents[1]

When = Literal["loaded", "called", "checked"]
WHEN: Mapping[When, str] = {
    "loaded": "when modules are loaded",
    "called": "or functions called",
    "checked": "or types checked (TYPE_CHECKING)",
}


@dataclass(frozen=True)
class Module:
    """One file."""

    lines: int
    code: int  # lines that are neither empty, nor comments, nor docstrings
    functions: tuple[tuple[str, int], ...]  # each with its lines, its docstring among them
    imports: frozenset[tuple[str, When]]  # what, and when that happens
    names: Mapping[str, int]  # how often each private name is used, where it is not defined


def read(package: Path) -> dict[str, Module]:
    """The modules of a package by their dotted names; imports of others are left out."""
    files = {_dotted(path, package): path for path in sorted(package.rglob("*.py"))}
    return {name: _module(name, path, files.keys()) for name, path in files.items()}


def _dotted(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _module(name: str, path: Path, known: Iterable[str]) -> Module:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    around = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imports = {(m, when) for m, when in _imports(tree, around, set(known)) if m != name}
    return Module(
        lines=len(source.splitlines()),
        code=_code_lines(source, tree),
        functions=tuple((f.name, (f.end_lineno or f.lineno) - f.lineno + 1) for f in functions),
        imports=frozenset(imports),
        names=Counter(_private_names(tree)),
    )


def _code_lines(source: str, tree: ast.AST) -> int:
    docs = [node for node in ast.walk(tree) if _is_text(node)]
    inside = {n for d in docs for n in range(d.lineno, (d.end_lineno or d.lineno) + 1)}
    lines = enumerate(source.splitlines(), 1)
    return sum(n not in inside and bool(x.strip()) and x.strip()[0] != "#" for n, x in lines)


def _is_text(node: ast.AST) -> TypeGuard[ast.Expr]:
    """Returns whether a statement is a docstring, of whatever stands before it."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _private_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
        if name.startswith("_") and not name.startswith("__"):
            yield name


def _imports(
    node: ast.AST, around: str, known: set[str], when: When = "loaded"
) -> Iterator[tuple[str, When]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, when) for alias in node.names if alias.name in known)
    elif isinstance(node, ast.ImportFrom):
        source = resolve_name("." * node.level + (node.module or ""), around)
        for alias in node.names:
            inner = f"{source}.{alias.name}"
            if inner in known or source in known:
                yield inner if inner in known else source, when
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        when = "checked"
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        when = "called"
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, around, known, when)


def cycles(modules: Mapping[str, Module], whens: Iterable[When]) -> list[list[str]]:
    """Modules that import each other, directly or through others; the largest cycle first.

    Args:
        modules: Of the package.
        whens: Which imports count.
    """
    counted = set(whens)
    edges = {name: {m for m, when in x.imports if when in counted} for name, x in modules.items()}
    reached = {name: _reached(name, edges) for name in edges}
    found = {
        tuple(sorted(m for m in reached[name] if name in reached[m]))
        for name in edges
        if name in reached[name]
    }
    return [list(cycle) for cycle in sorted(found, key=lambda c: (-len(c), c))]


def _reached(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += edges[name]
    return found


def _small_with_one_importer(modules: Mapping[str, Module]) -> Iterator[tuple[int, str, str]]:
    importers: dict[str, list[str]] = {}
    for name, module in modules.items():
        for imported in {m for m, _ in module.imports}:
            importers.setdefault(imported, []).append(name)
    for name, found in importers.items():
        if len(found) == 1 and modules[name].lines < SMALL:
            yield modules[name].lines, name, found[0]


def _private_functions(modules: Mapping[str, Module]) -> tuple[int, int]:
    """Returns how many private functions and methods there are, and how many are used once."""
    private = once = 0
    for module in modules.values():
        for name, _ in module.functions:
            if name.startswith("_") and not name.startswith("__"):
                private += 1
                once += module.names.get(name, 0) == 1
    return private, once


def report(package: Path) -> Iterator[str]:
    """The lines to print."""
    modules = read(package)
    lengths = {name: module.lines for name, module in modules.items()}
    longest = max(lengths, key=lengths.__getitem__)
    yield f"{sum(lengths.values())} lines in {len(modules)} files"
    yield f"median file {statistics.median(lengths.values()):.0f} lines"
    yield f"longest file {lengths[longest]} lines: {longest}"
    every = [(n, f"{m}.{f}") for m, x in modules.items() for f, n in x.functions]
    yield f"{sum(module.code for module in modules.values())} lines of code"
    small = sorted(_small_with_one_importer(modules))
    yield f"{len(small)} modules of fewer than {SMALL} lines have one importer"
    yield from (f"  {lines} {name}, of {importer}" for lines, name, importer in small)
    private, once = _private_functions(modules)
    yield f"{once} of {private} private functions are used once ({once / max(private, 1):.0%})"
    long = sorted((pair for pair in every if pair[0] > LONG), reverse=True)
    yield f"{len(long)} of {len(every)} functions have more than {LONG} lines"
    yield from (f"  {lines} {name}" for lines, name in long)
    whens: list[When] = []
    for when, words in WHEN.items():
        whens.append(when)
        found = cycles(modules, whens)
        sizes = f", of {' and '.join(str(len(c)) for c in found)} modules" if found else ""
        yield f"{len(found)} import cycles {words}{sizes}"
        yield from (f"  {' '.join(cycle)}" for cycle in found)


if __name__ == "__main__":
    given = sys.argv[1:] or [str(ROOT / "dynamo_backends")]
    print(*report(Path(given[0]).resolve()), sep="\n")
    for name in () if sys.argv[1:] else ("tests", "benchmarks", "tools"):
        files = list((ROOT / name).rglob("*.py"))
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        print(f"{name}/: {lines} lines in {len(files)} files")
