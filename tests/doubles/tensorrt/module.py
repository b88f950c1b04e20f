"""Puts the double together as a module `tensorrt`."""

import importlib.machinery
import types
from dataclasses import dataclass, field
from typing import Any

from tests.doubles.tensorrt import building, enums, parsing, running
from tests.doubles.tensorrt.device import HostDevice

_ENUMS = (
    "DataType", "ErrorCode", "ExecutionContextAllocationStrategy", "HardwareCompatibilityLevel",
    "MemoryPoolType", "SerializationFlag", "TensorLocation",
)  # fmt: skip

VERSIONS = {10: "10.16.1.11", 11: "11.4.0.106"}


@dataclass
class Log:
    """What was done with a double.

    Attributes:
        device: The device that engines are built for.
        builds: Facts of each engine that was built.
        refits: Names of the weights of each refit.
        loads: Engines that were deserialized.
        contexts: Execution contexts that were made.
        runs: Executions.
        timing_hits: Builds of networks whose times were known.
        budgets: Weight streaming budgets that were set.
    """

    device: HostDevice
    builds: list[dict[str, Any]] = field(default_factory=list)
    refits: list[list[str]] = field(default_factory=list)
    loads: int = 0
    contexts: int = 0
    runs: int = 0
    timing_hits: int = 0
    budgets: list[int] = field(default_factory=list)


def make(major: int, device: HostDevice) -> Any:
    """A module with the surface of a version; its attribute `double` is the `Log`."""
    version = VERSIONS[major]
    module: Any = types.ModuleType("tensorrt")
    module.__version__ = version
    module.__spec__ = importlib.machinery.ModuleSpec("tensorrt", None)
    module.double = log = Log(device)
    module.BuilderFlag = getattr(enums, f"BuilderFlag{major}")
    module.NetworkDefinitionCreationFlag = getattr(enums, f"NetworkDefinitionCreationFlag{major}")
    for name in _ENUMS:
        setattr(module, name, getattr(enums, name))
    for name in ("ILogger", "OnnxParser", "OnnxParserRefitter", "ParserError",
                 "INetworkDefinition"):  # fmt: skip
        setattr(module, name, getattr(parsing, name))
    for name in ("IBuilderConfig", "IHostMemory", "IOptimizationProfile", "ITimingCache"):
        setattr(module, name, getattr(building, name))
    for name in ("ICudaEngine", "IExecutionContext", "ISerializationConfig", "Weights"):
        setattr(module, name, getattr(running, name))
    facts = {
        "_log": log,
        "_version": version,
        "_flags": module.BuilderFlag,
        "_creation": module.NetworkDefinitionCreationFlag,
    }
    for base in (building.Builder, running.Runtime, running.Refitter):
        setattr(module, base.__name__, type(base.__name__, (base,), facts))
    return module
