"""The texts of errors: what was given, what is valid, what to do."""

import importlib
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import dynamo_backends
from dynamo_backends import (
    BackendUnavailableError,
    DeviceError,
    FallbackRefusedError,
    OptionError,
    UnknownBackendError,
)
from dynamo_backends.cli import diagnose, main
from dynamo_backends.xla import options as xla_options


def compile_with(**options: object) -> None:
    torch.compile(nn.Linear(2, 2), backend="openxla", options=options)(torch.ones(1, 2))


def cause(info: pytest.ExceptionInfo[BaseException]) -> BaseException:
    """The error as the backend raised it."""
    error = info.value
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    return error


def svd(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svd(x).S


CALLS: dict[type[Exception], tuple[Any, dict[str, Any]]] = {
    OptionError: (nn.Linear(2, 2), {"backend": "openxla", "options": {"verfy": "off"}}),
    FallbackRefusedError: (svd, {"backend": "onnxrt", "options": {"fallback": "error"}}),
    BackendUnavailableError: (nn.Linear(2, 2), {"backend": "tensorrt"}),
}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("way", ["torch.compile", "compiler", "optimize", "explain"])
def test_an_error_is_caught_by_its_class_where_a_compiled_function_is_called(
    kind: type[Exception], way: str
):
    tensorrt = dynamo_backends.get_backend("tensorrt")
    if kind is BackendUnavailableError and tensorrt.availability().usable:
        pytest.skip("TensorRT can run here")
    function, given = CALLS[kind]
    options = given.get("options", {})
    call = {
        "torch.compile": lambda x: torch.compile(function, **given)(x),
        "compiler": lambda x: torch.compile(
            function, backend=dynamo_backends.compiler(given["backend"], **options)
        )(x),
        "optimize": lambda x: dynamo_backends.optimize(given["backend"], options=options)(function)(
            x
        ),
        "explain": lambda x: dynamo_backends.explain(function, x, **given),
    }[way]
    with torch.no_grad(), pytest.raises(kind) as info:
        call(torch.ones(2, 2))
    assert type(info.value).__name__ == kind.__name__
    copied = pickle.loads(pickle.dumps(info.value))
    assert type(copied) is kind
    assert str(copied) in str(info.value)


def test_who_catches_torchs_class_catches_ours_and_sees_their_own_lines_first():
    with pytest.raises(BackendCompilerFailed) as info:
        compile_with(verfy="off")
    assert isinstance(info.value.inner_exception, OptionError)
    ours = [entry for entry in info.traceback if "/dynamo_backends/" in str(entry.path)]
    assert [entry.name for entry in ours] == ["__call__"]
    assert info.traceback[-1].path == ours[0].path
    with torch._dynamo.config.patch(verbose=True), pytest.raises(OptionError) as info:
        compile_with(verfy="off")
    assert "parse" in [entry.name for entry in info.traceback]


def test_jax_missing(monkeypatch: pytest.MonkeyPatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n.startswith("jax") else find(n, *a)
    )
    with pytest.raises(BackendUnavailableError) as info:
        compile_with()
    error = cause(info)
    assert "jax and jaxlib are not installed" in str(error)
    assert "pip install 'dynamo-backends[xla]'" in str(error)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_absent():
    with pytest.raises(DeviceError) as info:
        compile_with(device="cuda")
    error = cause(info)
    assert "device='cuda' was requested, but jax has no CUDA plugin" in str(error)
    assert "pip install 'jax[cuda13]'" in str(error)


def test_an_unknown_option_names_the_valid_ones_and_the_nearest():
    with pytest.raises(
        OptionError, match=r"has no option 'freezin'\. Did you mean 'freezing'"
    ) as info:
        dynamo_backends.compiler("openxla", freezin="off")
    assert "Valid options: batch_placements, bucket_growth, buckets, cache" in str(info.value)
    with pytest.raises(Exception) as wrapped:  # noqa: PT011
        compile_with(freezin="off")
    assert isinstance(cause(wrapped), OptionError)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"verify": "yes"}, "must be one of 'first', 'always', 'off' or bool, not 'yes' (str)"),
        (
            {"min_block_size": True},
            "option 'min_block_size' of openxla must be int, not True (bool)",
        ),
        ({"min_block_size": 0}, "option 'min_block_size' of openxla must be at least 1, not 0"),
        ({"fallback": "no"}, "option 'fallback' of openxla must be one of 'eager', 'error', not"),
    ],
)
def test_an_option_of_the_wrong_type_or_value(options: dict, text: str):
    with pytest.raises(OptionError) as info:
        dynamo_backends.compiler("openxla", **options)
    assert text in str(info.value)


def test_a_device_of_an_unknown_kind(monkeypatch):
    monkeypatch.setattr(xla_options, "PLATFORMS", ("cpu", "cuda", "tpu"))  # and no test double
    with pytest.raises(OptionError) as info:
        dynamo_backends.compiler("openxla", device="gpu")
    assert "must be one of 'auto', 'cpu', 'cuda', 'tpu', not 'gpu'" in str(info.value)


def test_a_misspelt_backend():
    with pytest.raises(
        UnknownBackendError, match=r"there is no backend 'openxa'\. Did you mean 'openxla'"
    ):
        dynamo_backends.compiler("openxa")


def test_a_mode_is_inductors():
    with pytest.raises(Exception) as info:  # noqa: PT011
        torch.compile(nn.Linear(2, 2), backend="openxla", mode="max-autotune")(torch.ones(1, 2))
    assert "openxla does not support mode; mode='max-autotune' is for Inductor" in str(cause(info))


def test_the_mode_that_transformers_gives_changes_nothing():
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="openxla", mode="reduce-overhead")
    torch.testing.assert_close(compiled(torch.ones(1, 2)), model(torch.ones(1, 2)))


@torch.library.custom_op("dynamo_backends_tests::unheard_of", mutates_args=())
def unheard_of(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@unheard_of.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_refused_fallback_names_operator_reason_and_source_line():
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return unheard_of(y)  # the unsupported line

    compiler = dynamo_backends.compiler("openxla", fallback="error")
    with pytest.raises(Exception) as info:  # noqa: PT011
        torch.compile(fn, backend=compiler)(torch.ones(3))
    error = cause(info)
    assert isinstance(error, FallbackRefusedError)
    name = "dynamo_backends_tests.unheard_of.default"
    assert f"openxla cannot run {name}: it has no lowering to XLA" in str(error)
    assert "test_errors.py:" in str(error)
    assert "the unsupported line" in str(error)


def test_equal_options_give_the_same_object():
    a = dynamo_backends.compiler("openxla", verify=True, cache=False)
    assert a is dynamo_backends.compiler("openxla", cache=False, verify=True)
    assert a is not dynamo_backends.compiler("openxla", verify=True)


def test_doctor_finds_nothing_broken_here(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor"]) == 0
    assert "backend openxla" in capsys.readouterr().out


def test_doctor_fails_on_a_package_that_does_not_import(monkeypatch: pytest.MonkeyPatch):
    import_module = importlib.import_module

    def damaged(name: str) -> object:
        if name == "jax":
            raise ImportError("jax is damaged")
        return import_module(name)

    monkeypatch.setattr(importlib, "import_module", damaged)
    broken = [c for c in diagnose() if c.status == "broken"]
    assert [c.name for c in broken] == ["jax"]
    assert "jax is damaged" in broken[0].detail
    assert broken[0].remedy == "pip install 'dynamo-backends[xla]'"
    assert main(["doctor", "--json"]) == 1


def test_list_shows_every_backend(capsys: pytest.CaptureFixture[str]):
    assert main(["list"]) == 0
    assert "openxla" in capsys.readouterr().out
