"""OpenVINO's packages, imported without their telemetry.

Importing `openvino` writes an identifier into the user's home folder and forks a process that sends
an event to Google Analytics; so does importing `nncf`. Both do without where `openvino_telemetry`
cannot be imported. A program that has imported them before has decided for itself.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType

_TELEMETRY = "openvino_telemetry"


@contextlib.contextmanager
def disabling_telemetry() -> Iterator[None]:
    """Makes `openvino_telemetry` unimportable inside the block."""
    modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]
    imported = modules.pop(_TELEMETRY, None)
    modules[_TELEMETRY] = None
    try:
        yield
    finally:
        del modules[_TELEMETRY]
        if imported is not None:
            modules[_TELEMETRY] = imported


with disabling_telemetry():
    import openvino
    from openvino import CompiledModel, Core, Model, PartialShape, Type, op
    from openvino import _pyopenvino as native
    from openvino import opset13 as ops
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder
    from openvino.passes import ConstantFolding, Manager

__all__ = [
    "CompiledModel",
    "ConstantFolding",
    "Core",
    "FrontEndManager",
    "Manager",
    "Model",
    "PartialShape",
    "TorchFXPythonDecoder",
    "Type",
    "disabling_telemetry",
    "native",
    "op",
    "openvino",
    "ops",
]
