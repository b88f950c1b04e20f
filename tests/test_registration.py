"""A backend is one folder, one row in the registry, and what the project says of it.

Each check names the backend and the place that was forgotten.
"""

import ast
import importlib
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamo_backends.cli.doctor import GPU_BACKENDS
from dynamo_backends.int8.options import NNCF, TORCHAO
from dynamo_backends.interface import registry
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.compiler import Compiler
from dynamo_backends.interface.registry import get_backend

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dynamo_backends"
OF_ANY_BACKEND = {"dynamo_backends", "torch", "numpy", "sympy", *sys.stdlib_module_names}
QUANTIZERS = {*NNCF, *TORCHAO}
"""What backends import for an option alone; the extra `int8` has them."""
CONFORMANCE = "tests/conformance/test_opinfo.py"
MODELS = "tests/models/test_every_backend.py"


@dataclass(frozen=True)
class Project:
    """What the files say.

    Attributes:
        folders: Those with a backend.py.
        classes: Names of backend classes, each with the folder that defines it.
        rows: Names in the registry, each with the folder of its class.
        backends: The backends by name.
        exports: "folder:name" of the compilers that folders have.
        points: The entry points for torch.compile.
        extras: The packages of each extra, with those of the extras that it names.
        support: Names of each row of the README's table, where they run, and the status.
        imports: The modules that each folder imports, without those of any backend.
        tables: Names in the tables of tests that every verified backend takes part in.
        gpu: Names that `doctor` can say of what they lack on a GPU.
        torchs: Names for which `torch.compile` calls a function of torch's own.
    """

    folders: frozenset[str]
    classes: Mapping[str, str]
    rows: Mapping[str, str]
    backends: Mapping[str, Backend]
    exports: frozenset[str]
    points: Mapping[str, str]
    extras: Mapping[str, frozenset[str]]
    support: tuple[tuple[tuple[str, ...], str, str], ...]
    imports: Mapping[str, frozenset[str]]
    tables: Mapping[str, frozenset[str]]
    gpu: frozenset[str]
    torchs: frozenset[str]


def read() -> Project:
    described = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = {name: where.split(".")[1] for name, where in registry._OURS.items()}
    every = {path.parent.name for path in PACKAGE.glob("*/backend.py")}
    folders = frozenset(every - {"interface"})
    return Project(
        folders=folders,
        classes={name: folder for folder in folders for name in classes_of(folder)},
        rows=rows,
        backends={name: get_backend(name) for name in rows},
        exports=frozenset(f"{folder}:{name}" for name, folder in rows.items() if has(folder, name)),
        points=described["entry-points"][registry.ENTRY_POINT_GROUP],
        extras=extras_of(described["optional-dependencies"]),
        support=tuple(support_of((ROOT / "README.md").read_text(encoding="utf-8"))),
        imports={folder: imports_of(folder) - OF_ANY_BACKEND - QUANTIZERS for folder in folders},
        tables={path: keys_of(ROOT / path, "BACKENDS") for path in (CONFORMANCE, MODELS)},
        gpu=frozenset(backend.name for backend in GPU_BACKENDS),
        torchs=frozenset(torchs_own()),
    )


def trees(folder: str) -> Iterator[ast.AST]:
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        yield from ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def classes_of(folder: str) -> Iterator[str]:
    """Names given in class bodies that have a summary, too."""
    for node in trees(folder):
        if isinstance(node, ast.ClassDef):
            assigned = {
                target.id: statement.value
                for statement in node.body
                if isinstance(statement, ast.Assign)
                for target in statement.targets
                if isinstance(target, ast.Name)
            }
            if isinstance(name := assigned.get("name"), ast.Constant) and "summary" in assigned:
                yield name.value


def imports_of(folder: str) -> frozenset[str]:
    """The first part of each module that is imported, by a statement or by `import_module`."""
    found: set[str] = set()
    for node in trees(folder):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module)):
                found.add(module)
            case ast.Call(
                func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(m))]
            ):
                found.add(m)
    return frozenset(name.partition(".")[0] for name in found)


def has(folder: str, name: str) -> bool:
    found = getattr(importlib.import_module(f"dynamo_backends.{folder}"), name, None)
    return isinstance(found, Compiler) and found.name == name


def extras_of(given: Mapping[str, list[str]]) -> dict[str, frozenset[str]]:
    def expand(extra: str) -> Iterator[str]:
        for requirement in given[extra]:
            if inner := re.match(r"dynamo-backends\[(.*)\]", requirement):
                for name in inner[1].split(","):
                    yield from expand(name)
            else:
                yield re.split(r"[^\w.-]", requirement, maxsplit=1)[0]

    return {extra: frozenset(expand(extra)) for extra in given}


def support_of(readme: str) -> Iterator[tuple[tuple[str, ...], str, str]]:
    table = readme.partition("\n## Support\n")[2].partition("\n## ")[0]
    for line in table.splitlines():
        if line.startswith("| `"):
            names, _, where, status = (cell.strip() for cell in line.strip("|").split("|"))
            yield tuple(re.findall(r"`(\w+)`", names)), where, status


def keys_of(path: Path, table: str) -> frozenset[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys))
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict(keys=keys))
            ) if name == table:
                return frozenset(key.value for key in keys if isinstance(key, ast.Constant))
    raise AssertionError(f"{path} has no table {table}")


def torchs_own() -> Iterator[str]:
    from torch._dynamo.backends import registry as of_torch

    torch._dynamo.list_backends(exclude_tags=())
    for name, function in of_torch._COMPILER_FNS.items():
        if (getattr(function, "__module__", None) or "").startswith("torch."):
            yield name


def in_the_registry(project: Project) -> Iterator[str]:
    for folder in project.folders - set(project.rows.values()):
        yield f"dynamo_backends/{folder}/ has a backend.py, and registry._OURS has no row for it"
    for folder in set(project.rows.values()) - project.folders:
        yield f"registry._OURS has a row for dynamo_backends/{folder}/, which has no backend.py"
    for name, folder in project.classes.items():
        if name not in project.rows and name not in project.torchs:  # inductor, for whole steps
            yield f"{name}: dynamo_backends/{folder}/ defines it, and registry._OURS has no row"
    for name, backend in project.backends.items():
        if backend.name != name:
            yield f"{name}: its row in registry._OURS leads to a backend called {backend.name}"


def in_entry_points(project: Project) -> Iterator[str]:
    for name, folder in project.rows.items():
        value = f"dynamo_backends.{folder}:{name}"
        if project.points.get(name) != value:
            yield f"{name}: pyproject's entry points of torch_dynamo_backends lack {value!r}"
        if f"{folder}:{name}" not in project.exports:
            yield f"{name}: dynamo_backends/{folder}/__init__.py has no compiler({name!r})"
        if name in project.torchs:
            yield f"{name}: torch's own function has the name; _autoload._STUBS has no row for it"
    for name, value in project.points.items():
        if name not in project.rows and not value.startswith("dynamo_backends.legacy:"):
            yield f"{name}: pyproject has an entry point, and registry._OURS has no row"


def in_the_readme(project: Project) -> Iterator[str]:
    told = {name for names, _, _ in project.support for name in names}
    for name in project.rows.keys() - told:
        yield f"{name}: the README's support table has no row for it"
    for name in told - project.rows.keys():
        yield f"{name}: the README's support table has a row, and registry._OURS has none"


def in_tests(project: Project) -> Iterator[str]:
    """What is called verified is in the tests' tables; variants are tested as what they vary."""
    for names, where, status in project.support:
        if where != "CPU" or not status.startswith("verified"):
            continue
        for name in names:
            backend = project.backends[name]
            for path, table in project.tables.items():
                has_own = path == MODELS and name == "openxla"  # tests/models/test_models.py
                if name not in table and not (backend.same_as or backend.is_verified or has_own):
                    yield f"{name}: the README calls it verified, and {path} has no row for it"


def in_doctor(project: Project) -> Iterator[str]:
    for names, where, _ in project.support:
        if where.startswith("CUDA") and project.gpu.isdisjoint(names):
            yield f"{names[0]}: it runs on CUDA, and cli/doctor.py's GPU_BACKENDS has no row for it"


def in_packages(project: Project) -> Iterator[str]:
    """Autotune, `doctor` and the keys of caches know a vendor's packages from these attributes."""
    for name, backend in project.backends.items():
        known = {module.partition(".")[0] for module in backend.packages}
        others = [b for n, b in project.backends.items() if project.rows[n] == project.rows[name]]
        known |= {module.partition(".")[0] for other in others for module in other.packages}
        for module in sorted(project.imports[project.rows[name]] - known):
            yield f"{name}: its folder imports {module}, and `packages` does not have it"
        if extra := re.search(r"dynamo-backends\[(\w+)\]", backend.install):
            installed = project.extras.get(extra[1], frozenset())
        else:
            installed = frozenset(backend.install.split())
        for package in backend.packages.values():
            if package not in installed:
                what = f"pyproject's extra {extra[1]}" if extra else "`install`"
                yield f"{name}: it needs {package}, and {what} does not have it"
    for package in {*NNCF.values(), *TORCHAO.values()} - project.extras.get("int8", frozenset()):
        yield f"int8 needs {package}, and pyproject's extra int8 does not have it"


CHECKS = (in_the_registry, in_entry_points, in_the_readme, in_tests, in_doctor, in_packages)


def omissions(project: Project) -> list[str]:
    return [text for check in CHECKS for text in check(project)]


@pytest.fixture(scope="module")
def project() -> Project:
    return read()


def test_nothing_was_forgotten(project: Project):
    assert omissions(project) == []


def changed(field: str, change: Callable[[Any], Any]) -> Callable[[Project], Project]:
    return lambda project: replace(project, **{field: change(getattr(project, field))})


def with_row(name: str, value: Any) -> Callable[[Any], Any]:
    return lambda old: {**old, name: value}


def without(name: str) -> Callable[[Any], Any]:
    return lambda old: {key: value for key, value in old.items() if key != name}


def given(backend: str, **attributes: Any) -> Callable[[Project], Project]:
    """A project in which a backend's class has other attributes."""

    def change(old: Mapping[str, Backend]) -> dict[str, Backend]:
        kind = type(old[backend])
        return {**old, backend: type(kind.__name__, (kind,), attributes)()}

    return changed("backends", change)


PLANTED: list[tuple[str, Callable[[Project], Project]]] = [
    ("dynamo_backends/new/ has a backend.py, and", changed("folders", lambda old: old | {"new"})),
    ("new: dynamo_backends/xla/ defines it, and", changed("classes", with_row("new", "xla"))),
    ("iree: its row in registry._OURS leads to", given("iree", name="irree")),
    ("iree: pyproject's entry points", changed("points", without("iree"))),
    ("ov: dynamo_backends/openvino/__init__",
     changed("exports", lambda old: old - {"openvino:ov"})),
    ("tvm: torch's own function has the name", changed("torchs", lambda old: old | {"tvm"})),
    ("new: pyproject has an entry point", changed("points", with_row("new", "new:new"))),
    ("tvm: the README's support table",
     changed("support", lambda old: [row for row in old if "tvm" not in row[0]])),
    ("iree: the README calls it verified, and tests/m", changed("tables", with_row(MODELS, []))),
    ("nvfuser: it runs on CUDA, and cli/doctor.py", changed("gpu", lambda old: old - {"nvfuser"})),
    ("iree: its folder imports iree, and `packages`", given("iree", packages={})),
    ("iree: it needs iree-base-compiler, and pyproject's extra iree",
     changed("extras", with_row("iree", {"iree-base-runtime"}))),
    ("fx2trt: it needs torch-tensorrt, and `install`", given("fx2trt", install="pip install x")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "plant"), PLANTED, ids=[text for text, _ in PLANTED])
def test_what_is_forgotten_is_named(
    text: str, plant: Callable[[Project], Project], project: Project
):
    found = omissions(plant(project))
    assert [line for line in found if line.startswith(text)], found
