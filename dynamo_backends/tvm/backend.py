"""The backend `tvm`: Apache TVM's Relax on torch's memory."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.graph import Graph, require_cpu_inputs
from dynamo_backends.interface.backend import RANGED, Availability, Backend
from dynamo_backends.interface.options import Limits, Options
from dynamo_backends.interface.plan import Support


@dataclass(frozen=True)
class TvmOptions(Options):
    """The options of `tvm`, besides those that every backend has.

    Attributes:
        num_threads: Number of threads in TVM's thread pool; 0: as many as torch uses.
        tune_trials: Maximum number of schedules that are measured for each graph (see `tuning`);
            0: only schedules from earlier tuning are used.
        tune_budget_s: Time limit for tuning in seconds, shared by all graphs of this process.
    """

    num_threads: int = 0
    tune_trials: int = 0
    tune_budget_s: float | int = 300

    LIMITS: ClassVar[Limits] = {
        "num_threads": (0, None),
        "tune_trials": (0, None),
        "tune_budget_s": (1, None),
    }


class TVM(Backend):
    """See the module's docstring."""

    name = "tvm"
    summary = "Apache TVM"
    Options = TvmOptions
    dynamic_shapes = RANGED
    serves_ranges = True
    depends_on_ranges = False
    trains = True
    packages: ClassVar[Mapping[str, str]] = {"tvm": "apache-tvm", "tvm_ffi": "apache-tvm-ffi"}
    install = "pip install 'dynamo-backends[tvm]'"

    def availability(self) -> Availability:
        """See `Backend.availability`."""
        if no := self.check_packages():
            return no
        return Availability(True, f"TVM {self.versions()['apache-tvm']}", devices=("cpu",))

    def check_graph(self, graph: Graph, options: TvmOptions) -> None:
        """See `Backend.check_graph`."""
        require_cpu_inputs(graph, "tvm")

    def preserved_operators(self, options: TvmOptions) -> Collection[OpOverload]:
        """See `Backend.preserved_operators`."""
        from dynamo_backends.tvm.exclusions import whole_operators

        return whole_operators()

    def supports(self, node: fx.Node, options: TvmOptions) -> Support:
        """See `Backend.supports`."""
        from dynamo_backends.tvm.trial import supports

        return supports(node, options.cache)

    def compile(self, graph: Graph, options: TvmOptions) -> Any:
        """See `Backend.compile`."""
        from dynamo_backends.tvm.compiler import compile_graph

        return compile_graph(graph, _settings(options))

    def cache_key(self, options: TvmOptions) -> str:
        """See `SavesExecutables.cache_key`."""
        from dynamo_backends.runtime.cache import source_digest
        from dynamo_backends.tvm.session import describe_host
        from dynamo_backends.tvm.tuning import records_of

        threads = _settings(options).threads
        state = records_of(threads).state()
        parts = (self.versions(), source_digest(), describe_host(), threads, state)
        return " ".join(map(str, parts))

    def load(self, parts: Mapping[str, bytes], graph: Graph, options: TvmOptions) -> Any:
        """See `SavesExecutables.load`."""
        from dynamo_backends.tvm.ranged import executable_class
        from dynamo_backends.tvm.runtime import TvmExecutable

        return TvmExecutable.load(dict(parts), graph, _settings(options), executable_class)


def _settings(options: TvmOptions) -> Any:
    from dynamo_backends.tvm.session import Settings

    return Settings(options.num_threads, options.tune_trials, options.tune_budget_s)
