"""The double has the surface of the real bindings: names, parameters, and no more.

Where `tensorrt` can be imported, its version's double is compared with it, GPU or not.
"""

import importlib
import importlib.util
import inspect
import re
from typing import Any

import pytest

from tests.doubles.tensorrt import HostDevice, make

CLASSES = (
    "Builder", "IBuilderConfig", "ICudaEngine", "IExecutionContext", "INetworkDefinition",
    "IOptimizationProfile", "ISerializationConfig", "ITimingCache", "OnnxParser",
    "OnnxParserRefitter", "ParserError", "Refitter", "Runtime", "Weights",
)  # fmt: skip
ENUMS = (
    "BuilderFlag", "DataType", "ErrorCode", "ExecutionContextAllocationStrategy",
    "HardwareCompatibilityLevel", "MemoryPoolType", "NetworkDefinitionCreationFlag",
    "SerializationFlag", "TensorLocation",
)  # fmt: skip


def importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None and bool(importlib.import_module(name))
    except ImportError:
        return False


NAME = next((n for n in ("tensorrt", "tensorrt_bindings") if importable(n)), None)


@pytest.fixture(scope="module")
def real() -> Any:
    if NAME is None:
        pytest.skip("TensorRT's bindings are not here")
    return importlib.import_module(NAME)


@pytest.fixture(scope="module")
def twin(real: Any) -> Any:
    return make(int(real.__version__.split(".")[0]), HostDevice())


@pytest.mark.parametrize("name", CLASSES)
def test_methods_and_their_parameters(real: Any, twin: Any, name: str):
    theirs, ours = getattr(real, name), getattr(twin, name)
    for method, value in _public(ours).items():
        assert hasattr(theirs, method), f"{name} has no {method}"
        if isinstance(value, property):
            assert isinstance(inspect.getattr_static(theirs, method), property), method
        elif callable(value):
            known = _signatures(getattr(theirs, method).__doc__ or "")
            assert _parameters(value) in known, (name, method, known)


@pytest.mark.parametrize("name", ENUMS)
def test_members(real: Any, twin: Any, name: str):
    theirs = {k: int(v) for k, v in getattr(real, name).__members__.items()}
    ours = {k: int(v) for k, v in getattr(twin, name).__members__.items()}
    assert ours.items() <= theirs.items()


def test_surfaces_differ_between_versions():
    ten, eleven = (make(major, HostDevice()) for major in (10, 11))
    assert {"FP16", "BF16"} == set(ten.BuilderFlag.__members__) - set(
        eleven.BuilderFlag.__members__
    )
    assert ten.NetworkDefinitionCreationFlag.STRONGLY_TYPED == 1
    assert eleven.NetworkDefinitionCreationFlag.STRONGLY_TYPED == 0
    for module in (ten, eleven):
        assert not hasattr(module.OnnxParser, "supports_model")


def _public(cls: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__[:-1]):
        found.update({k: v for k, v in vars(base).items() if not k.startswith("_")})
    return found


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(n for n in inspect.signature(function).parameters if n != "self")


def _signatures(text: str) -> list[tuple[str, ...]]:
    """The parameter names of each overload, and of calls without the optional ones."""
    found = []
    for line in text.splitlines():
        match = re.search(r"\w+\((.*)\) -> ", line)
        if match:
            names = re.findall(r"(\w+): ", match.group(1))
            found.append(tuple(n for n in names if n != "self"))
    return [*found, *(names[:i] for names in found for i in range(len(names)))]
