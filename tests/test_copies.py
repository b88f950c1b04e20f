"""Copies and pickles of what is compiled or loaded."""

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.interface.errors import PackageError
from dynamo_backends.package.steps.loaded import LoadedStep
from tests.backend_checks import mlp, usable


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, _pickled], ids=["deepcopy", "pickle"])


@torch.no_grad()
@COPIES
@pytest.mark.parametrize("options", [None, {"verify": "always"}], ids=["name", "compiler"])
@pytest.mark.parametrize("called", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_copy_of_a_compiled_module_has_weights_of_its_own(
    copied: Callable[[Any], Any], options: dict[str, Any] | None, called: bool
):
    backend: Any = usable("openxla")
    if options is not None:
        backend = dynamo_backends.compiler(backend, **options)
    model, x = mlp(), torch.randn(3, 6)
    compiled = torch.compile(model, backend=backend)
    if called:
        compiled(x)
    other = copied(compiled)
    torch.testing.assert_close(other(x), model(x))
    other._orig_mod[2].weight.mul_(2)
    with dynamo_backends.record() as reports:
        torch.testing.assert_close(other(x), other._orig_mod(x))
        torch.testing.assert_close(compiled(x), model(x))
        torch._dynamo.reset()
        other(x)
    assert reports[0].ops_on_backend > 0
    assert not torch.allclose(other(x), model(x))


@COPIES
def test_there_is_one_compiler_for_each_set_of_options(copied: Callable[[Any], Any]):
    """Dynamo recompiles where it is given another object."""
    for options in ({}, {"verify": "always"}, {"freezing": "off", "cache": False}):
        compiler = dynamo_backends.compiler("onnxrt", **options)
        assert copied(compiler) is compiler


@pytest.fixture
def package(tmp_path: Path) -> tuple[Path, Tensor, Tensor]:
    """Path of a package, an input, and the result for it."""
    model, x = mlp(), torch.randn(3, 6)
    path = tmp_path / "model.dbp"
    dynamo_backends.save(model, path, (x,), backend=usable("openxla"))
    with torch.no_grad():
        return path, x, model(x)


@COPIES
@pytest.mark.parametrize("strict", [True, False])
def test_a_copy_of_a_loaded_package(
    copied: Callable[[Any], Any], strict: bool, package: tuple[Path, Tensor, Tensor]
):
    path, x, expected = package
    loaded = dynamo_backends.load(path, strict=strict)
    calls: list[str] = []
    other = copied(loaded)
    other.register_forward_hook(lambda *_: calls.append("other"))
    torch.testing.assert_close(loaded(x), expected)
    torch.testing.assert_close(other(x), expected)
    assert calls == ["other"]
    assert (other.backend, other.source) == ("openxla", loaded.source)
    del loaded
    torch.testing.assert_close(copy.deepcopy(other)(x), expected)
    torch.testing.assert_close(other.in_eager(x), expected)
    within = copied(nn.Sequential(other, nn.Identity()))
    torch.testing.assert_close(within(x), expected)


def test_a_pickle_is_of_one_package(
    package: tuple[Path, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
):
    path, x, _ = package
    monkeypatch.chdir(path.parent)
    data = pickle.dumps(dynamo_backends.load(path.name))
    assert len(data) < 1000
    monkeypatch.chdir("/")
    assert pickle.loads(data)(x).shape == (3, 3)
    dynamo_backends.save(mlp(), path, (x,), backend="openxla")
    with pytest.raises(PackageError, match="is not the package that the pickled module was loaded"):
        pickle.loads(data)
    path.unlink()
    with pytest.raises(PackageError, match="there is no file"):
        pickle.loads(data)


def _call(compiled: Any, loaded: Any, x: Tensor, results: Any) -> None:
    with torch.no_grad():
        results.put([found.numpy() for found in (compiled(x), loaded(x))])


def test_a_spawned_process_gets_them(package: tuple[Path, Tensor, Tensor]):
    path, x, expected = package
    model = mlp()
    compiled = torch.compile(model, backend="openxla")
    with torch.no_grad():
        compiled(x)
    context = multiprocessing.get_context("spawn")
    results: Any = context.SimpleQueue()
    arguments = compiled, dynamo_backends.load(path), x, results
    process = context.Process(target=_call, args=arguments)
    process.start()
    process.join(300)
    assert process.exitcode == 0
    of_model, of_package = map(torch.from_numpy, results.get())
    torch.testing.assert_close(of_package, expected)
    with torch.no_grad():
        torch.testing.assert_close(of_model, model(x))


@COPIES
def test_steps_say_why_they_cannot_be_copied(copied: Callable[[Any], Any]):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = dynamo_backends.compile_step(train, model=model, optimizer=optimizer, backend="inductor")
    with pytest.raises(TypeError, match="bound to its model and optimizer"):
        copied(step)
    with pytest.raises(TypeError, match=r"Load the package again with dynamo_backends\.load_step"):
        copied(LoadedStep.__new__(LoadedStep))
