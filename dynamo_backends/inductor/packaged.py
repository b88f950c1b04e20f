"""Backends of Inductor for packages: AOTInductor compiles what they hold."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from dynamo_backends.aot.step.program.programs import CopyingProgram
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.lstm import without_lstm_workspaces
from dynamo_backends.inductor.backend import (
    Inductor,
    InductorFreezing,
    InductorMaxAutotune,
    InductorOptions,
)
from dynamo_backends.interface.backend import Availability
from dynamo_backends.interface.executable import Executable, StepProgram
from dynamo_backends.runtime.cache import source_digest
from dynamo_backends.runtime.cpu_info import cpu_cache_key


class _Packaged(InductorFreezing):
    """Compiles graphs on the CPU to libraries that other processes load without a compiler.

    This package's own kernels are compiled where they run, so they are not used.

    Attributes:
        freezes: Whether weights are compiled in.
    """

    freezes: ClassVar[bool] = True

    def availability(self) -> Availability:
        """See `Backend.availability`. Loading takes no compiler, and what compiles asks for one."""
        return Availability(True, f"AOTInductor of torch {torch.__version__}")

    def start_initialization(self, inputs: Any, options: Any) -> None:
        """See `Prefetches.prefetch`: no kernels of this package are needed."""

    def compile(self, graph: Graph, options: InductorOptions) -> Executable:
        """See `Backend.compile`. Code for other devices, and in int8, cannot be saved."""
        if options.is_int8 or not _is_on_cpu(graph):
            return super().compile(graph, options)
        from dynamo_backends.inductor.ahead import AheadExecutable
        from dynamo_backends.runtime.ranged_calls import make_for_range

        graph = without_lstm_workspaces(graph)
        reduced = options.precision == "bf16"
        return make_for_range(
            graph,
            lambda ranged: AheadExecutable(
                graph, self.settings, self.freezes, reduced, options.reserve, ranged
            ),
        )

    def cache_key(self, options: Any) -> str:
        """See `SavesExecutables.cache_key`."""
        return f"{torch.version.git_version} {source_digest()} {cpu_cache_key()}"

    def versions(self) -> dict[str, str]:
        """See `Backend.versions`."""
        abi = "C++11" if torch.compiled_with_cxx11_abi() else "before C++11"
        return {**super().versions(), "libstdc++ ABI": abi}

    def load(self, parts: Mapping[str, bytes], graph: Graph, options: Any) -> Executable:
        """See `SavesExecutables.load`."""
        from dynamo_backends.inductor.libraries import load_libraries

        return load_libraries(parts, graph, options.reserve)


class PackagedInductor(_Packaged, Inductor):
    """`inductor` in packages."""

    freezes = False

    def compile_step(self, graph: Graph, options: InductorOptions) -> StepProgram:
        """See `CompilesSteps.compile_step`: one library, whose results are copied."""
        return _Step(graph, self.compile(graph, options))

    def load_step(self, parts: Mapping[str, bytes], graph: Graph, options: Any) -> StepProgram:
        """See `SavesSteps.load_step`."""
        return _Step(graph, self.load(parts, graph, options))


class _Step(CopyingProgram):
    def __init__(self, graph: Graph, executable: Executable):
        super().__init__(graph, executable.bind(())[0])
        self.dump = executable.dump  # type: ignore[method-assign]


class PackagedInductorFreezing(_Packaged):
    """`inductor_freezing` in packages."""


class PackagedInductorMaxAutotune(_Packaged, InductorMaxAutotune):
    """`inductor_max_autotune` in packages."""


def _is_on_cpu(graph: Graph) -> bool:
    values = [node.meta.get("val") for node in (*graph.placeholders, *graph.calls)]
    return all(value.device.type == "cpu" for value in values if isinstance(value, Tensor))
