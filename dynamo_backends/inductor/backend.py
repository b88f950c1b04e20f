"""The backends `inductor_freezing` and `inductor_max_autotune`: Inductor with other settings.

The settings are in force while these graphs are compiled and at no other time; torch's own
`inductor` in the same process is as it was.
"""

import os
import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.call_arguments import dynamic_shape_reason
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.lstm import without_lstm_workspaces
from dynamo_backends.int8.options import TORCHAO, Int8Options, require_quantizer
from dynamo_backends.interface.backend import Availability, Backend
from dynamo_backends.interface.executable import Executable
from dynamo_backends.interface.plan import SUPPORTED, Support
from dynamo_backends.torchscript.backend import whole_operators

_INSTALL = "apt-get install g++ (or set the variable CXX to a compiler that is there)"


def _cxx() -> str:
    """Returns the compiler that Inductor looks for (`torch._inductor.config.cpp.cxx`)."""
    usual = {"darwin": "clang++", "win32": "cl"}
    return os.environ.get("CXX", usual.get(sys.platform, "g++"))


@dataclass(frozen=True)
class InductorOptions(Int8Options):
    """The options of Inductor's variants, besides those that every backend has.

    Attributes:
        precision: "float32" computes in the dtypes that the model has; "bf16" lets float32 products
            and convolutions, and what lies between them, be computed in bfloat16. With torchao,
            "int8-dynamic" computes linear layers in int8, with scales of each call; "int8-weights"
            keeps their weights in int8. Both need `tolerance` (docs/int8.md).
        reserve: On CPUs with glibc, keep the memory of temporaries between calls.
    """

    precision: Literal["float32", "bf16", "int8-dynamic", "int8-weights"] = "float32"
    reserve: bool = True


class InductorFreezing(Backend):
    """Inductor with weights compiled in, so that it folds and prepacks them.

    Attributes:
        settings: Settings of `torch._inductor.config`.
    """

    name = "inductor_freezing"
    summary = "Inductor with frozen weights"
    dynamic_shapes = "one executable for all sizes"
    serves_ranges = True
    Options = InductorOptions
    optional_packages = ("triton",)
    settings: ClassVar[dict[str, Any]] = {}

    def availability(self) -> Availability:
        """See `Backend.availability`. Inductor's programs for CPUs are C++."""
        if shutil.which(_cxx()) is None and not torch.cuda.is_available():
            reason = f"Inductor needs a C++ compiler, and {_cxx()!r} is not installed"
            return Availability(False, reason, _INSTALL)
        return Availability(True, f"Inductor of torch {torch.__version__}")

    def check_graph(self, graph: Graph, options: InductorOptions) -> None:
        """See `Backend.check_graph`."""
        if options.is_int8:
            require_quantizer(TORCHAO, self.name)

    def start_initialization(self, inputs: Sequence[Any], options: Any) -> None:
        """See `Prefetches.start_initialization`. Kernels are compiled beside capture."""
        from dynamo_backends.kernels.background_builds import start

        start(inputs)

    def preserved_operators(self, options: Any) -> Collection[OpOverload]:
        """See `Backend.preserved_operators`: Inductor decomposes what it wants decomposed."""
        from dynamo_backends.inductor.decompositions import CHECKED

        return frozenset(whole_operators()) - CHECKED

    def supports(self, node: fx.Node, options: Any) -> Support:
        """See `Backend.supports`. Inductor itself leaves to eager what it has no lowering for."""
        shape = dynamic_shape_reason(node)
        return SUPPORTED if shape is None else Support(False, shape)

    def compile(self, graph: Graph, options: InductorOptions) -> Executable:
        """See `Backend.compile`."""
        if options.is_int8:
            from dynamo_backends.inductor.quantized import InductorInt8Executable

            return InductorInt8Executable(without_lstm_workspaces(graph), options.precision)
        from dynamo_backends.inductor.runtime import InductorExecutable
        from dynamo_backends.runtime.ranged_calls import make_for_range

        graph = without_lstm_workspaces(graph)  # programs run outside of grad mode
        reduced = options.precision == "bf16"
        return make_for_range(
            graph,
            lambda ranged: InductorExecutable(
                graph, self.settings, reduced, options.reserve, ranged
            ),
        )


class Inductor(InductorFreezing):
    """Inductor whose programs read weights where they are, as torch's own `inductor`.

    It is for packages; torch.compile has torch's.
    """

    name = "inductor"
    summary = "Inductor, without frozen weights"

    def compile(self, graph: Graph, options: InductorOptions) -> Executable:
        """See `Backend.compile`."""
        if options.is_int8:
            return super().compile(graph, options)
        from dynamo_backends.inductor.runtime import LiveInductorExecutable
        from dynamo_backends.runtime.ranged_calls import make_for_range

        graph = without_lstm_workspaces(graph)
        reduced = options.precision == "bf16"
        return make_for_range(
            graph,
            lambda ranged: LiveInductorExecutable(
                graph, self.settings, reduced, options.reserve, ranged
            ),
        )


class InductorMaxAutotune(InductorFreezing):
    """Inductor that tries several kernels for each product and convolution.

    Its templates for CPUs need constant weights, so these are frozen as well.
    """

    name = "inductor_max_autotune"
    summary = "Inductor with frozen weights and max-autotune"
    settings: ClassVar[dict[str, Any]] = {
        "max_autotune": True,
        "coordinate_descent_tuning": True,
        # What it says of its choices goes to the user's terminal.
        "autotune_num_choices_displayed": 0,
        "max_autotune_report_choices_stats": False,
    }
