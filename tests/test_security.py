"""What SECURITY.md says: each claim has a test that fails when the check is removed.

| claim | test |
|---|---|
| a folder that others own or can write to is not used | `runtime/test_private_folder.py` |
| pipes, devices and links are no entries | `runtime/test_private_folder.py` |
| nothing in the cache is unpickled | here, for each kind of entry, and for the source |
| damaged entries are dropped | `runtime/test_cache.py`, `aot/test_traces.py` |
| nothing of a package is unpickled | here |
| its parts become no paths; it calls operators | `package/test_archive.py`, `test_checks.py` |
| a trace calls operators alone, and nothing in it becomes code | here |
| decisions that are imported hold no code | here, `autotune/test_decisions.py` |
| the package opens no connection | here; of OpenVINO, `openvino/test_vendor.py` |
"""

import ast
import contextlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd import descriptors

import dynamo_backends
from dynamo_backends._torch_private.graph_serialization import pack_static, unpack_static
from dynamo_backends.aot import traces
from dynamo_backends.autotune import serialization
from dynamo_backends.autotune.decisions import DecisionStore
from dynamo_backends.interface.errors import PackageError
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.kernels import timing as measured
from dynamo_backends.onnx import exporter_lowerings
from dynamo_backends.package import archive
from dynamo_backends.runtime.cache import DiskCache, cache_folder
from dynamo_backends.runtime.verdicts import VerdictStore
from dynamo_backends.tvm.records import Records
from dynamo_backends.workers.kernel_choices import Choices
from tests.bench.programs import ROOT

PACKAGE = ROOT / "dynamo_backends"


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """Is there once something has been unpickled; that the bomb works is shown at the end."""
    mark = tmp_path / "unpickled"
    yield mark
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists()


def plant(folder: Path, bomb: bytes) -> int:
    """Puts a bomb into every part of each entry below a folder; counts the entries."""
    count = 0
    for path in sorted(folder.rglob("*.bin")):
        cache = DiskCache(path.parent)
        parts = cache.get(path.stem)
        assert parts is not None
        assert cache.put(path.stem, dict.fromkeys(parts, bomb))
        count += 1
    for path in folder.rglob("*.json"):
        path.write_bytes(bomb)
        count += 1
    return count


@torch.no_grad()
@pytest.mark.parametrize(
    "backend",
    [
        "openxla",
        "onnxrt",
        "ov",
        *(pytest.param(b, marks=pytest.mark.long) for b in ("tvm", "iree")),
    ],
)
def test_entries_of_compiled_graphs_and_traces_are_not_unpickled(
    backend: str, mark: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DYNAMO_BACKENDS_CHECK", "0")
    monkeypatch.setattr(traces, "LEAST_S", 0.0)
    if not get_backend(backend).availability().usable:
        pytest.skip(f"{backend} cannot be used here")
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval(), torch.ones(3, 4)
    for _ in range(2):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
        assert plant(cache_folder(), pickle.dumps(Bomb(mark))) >= 2


def test_what_else_is_kept_is_not_unpickled(mark: Path, monkeypatch: pytest.MonkeyPatch):
    """Verdicts, choices, records of tuning, names of operators, decisions."""
    bomb = pickle.dumps(Bomb(mark))
    asked = []

    def get(cache: DiskCache, key: str) -> dict[str, bytes]:
        asked.append(cache.folder.name)
        return dict.fromkeys(("verdict", "choice", "record", "names"), bomb)

    monkeypatch.setattr(DiskCache, "get", get)
    choices = Choices(measured._store, lambda: "")
    exporter_lowerings._names.cache_clear()
    readers = [
        lambda: VerdictStore("onnxrt", ["ort"], shipped=False).get("kind", keep=True),
        lambda: choices._kept("kind"),
        lambda: Records("environment").get("0" * 64),
        exporter_lowerings._names,
    ]
    for reader in readers:
        with contextlib.suppress(ValueError):  # it is no JSON
            reader()
    assert len(asked) == len(readers)
    exporter_lowerings._names.cache_clear()
    monkeypatch.setattr(DiskCache, "read_file", lambda self, name: bomb)
    assert DecisionStore().get("a" * 64) is None


def test_a_package_is_not_unpickled(mark: Path, tmp_path: Path):
    """In each of its parts, and in the place of the file."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.ones(3, 4)
    path = tmp_path / "model.dbp"
    dynamo_backends.save(model, path, (x,), backend="openxla")
    bomb = pickle.dumps(Bomb(mark))
    with archive.Archive(path) as saved:
        manifest = saved.manifest
        parts = {name: saved.read(name) for name in saved.sizes}
    for name in parts:
        archive.write(path, manifest, {**parts, name: bomb})
        _load(path, x)
    archive.write(path, manifest, dict.fromkeys(parts, bomb))
    _load(path, x)
    for content in (bomb, _saved_by_torch(tmp_path, mark)):
        path.write_bytes(content)
        with pytest.raises(PackageError):
            dynamo_backends.load(path)
        with pytest.raises(PackageError):
            dynamo_backends.load_step(path)


def _load(path: Path, x: Tensor) -> None:
    """Loads and calls a package that somebody has changed; whether it can be is no matter."""
    with contextlib.suppress(Exception):
        dynamo_backends.load(path)(x)


def _saved_by_torch(folder: Path, mark: Path) -> bytes:
    torch.save(Bomb(mark), folder / "bomb.pt")
    return (folder / "bomb.pt").read_bytes()


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # torch, of pickles that it refuses
def test_what_processes_tell_each_other_in_files_is_not_unpickled(mark: Path, tmp_path: Path):
    """Copies of graphs and inputs, for processes that tune."""
    x = torch.ones(3)
    gm = torch.fx.experimental.proxy_tensor.make_fx(torch.relu)(x)
    serialization.write(tmp_path, gm, [x])
    serialization.write_other_inputs(tmp_path, [[x]], ())
    for bomb in (pickle.dumps(Bomb(mark)), _saved_by_torch(tmp_path, mark)):
        for name in ("tensors.pt", "others.pt"):
            (tmp_path / name).write_bytes(bomb)
        for read in (
            serialization.read,
            lambda folder: serialization.read_other_inputs(folder, [x]),
        ):
            with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
                read(tmp_path)
        (tmp_path / "graph.json").write_bytes(bomb)
        with pytest.raises(UnicodeDecodeError):
            serialization.read(tmp_path)
        serialization.write(tmp_path, gm, [x])
        serialization.write_other_inputs(tmp_path, [[x]], ())


CODE = "x = __import__('os').mkdir({!r})"


def test_a_trace_names_operators_and_nothing_becomes_code(
    mark: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(descriptors, "listdir", os.listdir, raising=False)

    def trace(x: Tensor) -> Tensor:
        return x.sin() * torch.tensor([1.0, 2.0])

    gm = torch.fx.experimental.proxy_tensor.make_fx(trace)(torch.ones(2))
    parts = pack_static(gm)
    head, *lines = (json.loads(line) for line in parts["graph"].decode().split("\n"))
    places = {line[0]: i for i, line in enumerate(lines)}
    code = CODE.format(str(mark))
    changes: list[tuple[str, int, Any]] = [
        ("placeholder", 2, code),
        ("placeholder", 1, code),
        ("get_attr", 2, f'a", {code}, "'),
        ("get_attr", 2, code),
        ("call_function", 2, {"operator": "os.system.default"}),
        ("call_function", 2, {"operator": "aten.sin.__class__"}),
        ("call_function", 2, {"function": "system"}),
        ("call_function", 2, "os.system"),
        ("call_function", 4, {"dict": [[code, 1]]}),
        ("call_function", 3, {"tuple": [{"torch": "load"}]}),
        ("call_function", 3, {"tuple": [{"descriptor": ["dataclasses", []]}]}),
        ("call_function", 3, {"tuple": [{"descriptor": ["listdir", []]}]}),
        ("call_function", 0, "call_module"),
        ("placeholder", 0, "call_module"),
        ("placeholder", 0, "call_method"),
        ("call_function", 0, "call_method"),
        ("output", 2, code),
    ]
    for op, field, value in changes:
        changed = [list(line) for line in lines]
        changed[places[op]][field] = value
        text = "\n".join(map(json.dumps, [head, *changed]))
        with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
            unpack_static({**parts, "graph": text.encode()})
    result = unpack_static(parts)(torch.ones(2))
    torch.testing.assert_close(result, trace(torch.ones(2)))


ALLOWED = {
    # A pipe from our parent, which has started this process.
    "pipeline/compiler_worker.py: pickle.loads",
    # The same pipe, in both directions: functions, items and results of conformance.
    "conformance/workers.py: pickle.loads",
    # For that pipe, and for files that torch itself unpickles (SECURITY.md names them).
    "_torch_private/precompile.py: GraphPickler.loads",
}
READERS = {"load", "loads", "Unpickler"}
MODULES = {"pickle", "marshal", "cloudpickle", "dill", "joblib", "shelve", "GraphPickler"}


def test_no_other_source_unpickles():
    """`torch.load` is there with `weights_only=True` alone, and `numpy.load` without pickles."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in MODULES:
                found |= {f"{path.relative_to(PACKAGE)}: from {node.module}"}
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            owner, _, attribute = name.rpartition(".")
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            is_torch = name in ("torch.load", "torch.jit.load", "torch.package.PackageImporter")
            unpickles = owner in MODULES and attribute in READERS
            unpickles |= is_torch and keywords.get("weights_only") != "True"
            unpickles |= keywords.get("allow_pickle", "False") != "False"
            if unpickles:
                found.add(f"{path.relative_to(PACKAGE)}: {name}")
    assert found == ALLOWED


CONNECTS = """
import sys
seen = []
def hook(name, arguments):
    if name in ("socket.connect", "socket.getaddrinfo", "socket.sendto", "urllib.Request"):
        seen.append((name, str(arguments)))
sys.addaudithook(hook)
import torch, dynamo_backends
x = torch.ones(3)
for backend in sys.argv[1:]:
    torch._dynamo.reset()
    torch.compile(lambda x: x.sin() + 1, backend=backend)(x)
print(seen)
import socket
try:
    socket.create_connection(("127.0.0.1", 9), timeout=1)
except OSError:
    pass
print(len(seen) > 0)
"""


def test_nothing_is_sent():
    names = [n for n in ("openxla", "onnxrt", "ov") if get_backend(n).availability().usable]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(
        [sys.executable, "-c", CONNECTS, *names],
        env=variables, capture_output=True, text=True, check=True, timeout=600,
    ).stdout.splitlines()  # fmt: skip
    assert said == ["[]", "True"]
