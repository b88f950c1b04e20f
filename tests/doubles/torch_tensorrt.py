"""A double of torch_tensorrt: exports what it is given and runs it with torch.

It has what is used of version 2.8: `compile` (py/torch_tensorrt/_compile.py) and the
registry of converters (dynamo/conversion/_ConverterRegistry.py), and refuses what they refuse.
Imported under the package's own name, it registers with torch what the package does
(dynamo/backend/backends.py).
"""

import sys
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

_SETTINGS = {
    "device", "disable_tf32", "hardware_compatible", "min_block_size", "optimization_level",
    "pass_through_build_failures", "truncate_double", "use_explicit_typing", "version_compatible",
    "workspace_size",
}  # fmt: skip


class Converters:
    """Which calls have a converter: all but a few."""

    without = frozenset({"aten.special_bessel_j0.default", "aten.bitwise_and.Tensor"})

    def __contains__(self, key: Any) -> bool:
        assert isinstance(key, fx.Node)
        return str(key.target) not in self.without


class Double:
    """The module.

    Attributes:
        compiled: Settings of each compilation, with the dtypes of the module's weights.
        broken: What compiling raises, if anything.
    """

    __version__ = "2.8.0"

    def __init__(self) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.broken: Exception | None = None

    def compile(
        self,
        module: torch.nn.Module,
        ir: str = "default",
        inputs: Sequence[Tensor] | None = None,
        **settings: Any,
    ) -> Any:
        """As `torch_tensorrt.compile(ir="dynamo")`: exports the module, then compiles it."""
        assert ir == "dynamo"
        assert isinstance(module, fx.GraphModule)
        assert inputs is not None
        assert set(settings) == _SETTINGS, set(settings) ^ _SETTINGS
        if self.broken is not None:
            raise self.broken
        exported = torch.export.export(module, tuple(inputs))
        weights = [t.dtype for t in exported.state_dict.values()]
        self.compiled.append({**settings, "weights": weights})
        return exported.module()


def install(monkeypatch: pytest.MonkeyPatch) -> Double:
    """Puts the double in the package's place."""
    double = Double()
    package: Any = types.ModuleType("torch_tensorrt")
    package.__spec__ = types.SimpleNamespace(name="torch_tensorrt")
    package.__version__, package.compile = double.__version__, double.compile
    registry: Any = types.ModuleType("_ConverterRegistry")
    registry.DYNAMO_CONVERTERS = Converters()
    monkeypatch.setitem(sys.modules, "torch_tensorrt", package)
    name = "torch_tensorrt.dynamo.conversion._ConverterRegistry"
    monkeypatch.setitem(sys.modules, name, registry)
    return double


def torch_tensorrt_backend(gm: fx.GraphModule, sample_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """The package's backend for `torch.compile`; runs the graph in eager."""
    used.append(gm)
    return gm.forward


used: list[fx.GraphModule] = []
"""What the backend was given."""

if __name__ == "torch_tensorrt":
    import torch._dynamo

    torch._dynamo.register_backend(name="torch_tensorrt")(torch_tensorrt_backend)
    torch._dynamo.register_backend(name="tensorrt")(torch_tensorrt_backend)
