"""The backend `iree`: the IREE compiler and runtime on torch's memory."""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.graph import Graph, require_cpu_inputs
from dynamo_backends.graph.partition import extract_part
from dynamo_backends.interface.backend import RANGED, Availability, Backend
from dynamo_backends.interface.errors import CompileError, LoweringError, OptionError
from dynamo_backends.interface.options import Limits, Options
from dynamo_backends.interface.plan import Plan, plan_per_call
from dynamo_backends.verify.trials.verdict_keys import verdict_key


def find_crashing_call(graph: Graph, breaks: Callable[[Graph], bool]) -> fx.Node:
    """Bisects a graph for the first call that makes the IREE compiler crash.

    Takes as many compilations as the number of calls has binary digits.

    Args:
        graph: The compiler breaks down at it.
        breaks: Whether it does at a part of the graph.
    """
    calls = [n for n in graph.calls if n.target is not operator.getitem]
    fits, too_long = 0, len(calls)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if breaks(_part(graph, calls[:middle])):
            too_long = middle
        else:
            fits = middle
    return calls[too_long - 1]


def _part(graph: Graph, calls: Sequence[fx.Node]) -> Graph:
    """Calls of a graph as a graph of its own, with what picks their results."""
    inside = set(calls)
    nodes = [
        n
        for n in graph.calls
        if n in inside or (n.target is operator.getitem and n.args[0] in inside)
    ]
    return extract_part(graph, nodes, on_backend=True).graph


@dataclass(frozen=True)
class IreeOptions(Options):
    """The options of `iree`, besides those that every backend has.

    Attributes:
        opt_level: How much IREE's compiler optimises.
        data_tiling: Pack the operands of matrix products and convolutions into tiles.
        num_threads: Number of IREE's threads on the CPU; 0: as many as torch uses.
        compiler_flags: Further flags of `iree-compile`, such as
            `("--iree-llvmcpu-enable-ukernels=all",)`. They take precedence over the options above.
        compile_seconds: Time limit for the compiler in seconds; then the graph runs in eager.
    """

    opt_level: Literal["O3", "O2", "O1", "O0"] = "O3"
    data_tiling: bool = True
    num_threads: int = 0
    compiler_flags: tuple[str, ...] = ()
    compile_seconds: int = 1800

    LIMITS: ClassVar[Limits] = {"num_threads": (0, None), "compile_seconds": (1, None)}

    def validate(self, backend: str) -> None:
        """See `Options.validate`."""
        super().validate(backend)
        for flag in self.compiler_flags:
            if not flag.startswith("--"):
                raise OptionError(
                    f"option 'compiler_flags' of {backend} must hold flags such as "
                    f"'--iree-opt-level=O2'; {flag!r} does not begin with '--'."
                )


class IREE(Backend):
    """See the module's docstring."""

    name = "iree"
    summary = "IREE compiler and runtime"
    Options = IreeOptions
    dynamic_shapes = RANGED
    serves_ranges = True
    depends_on_ranges = False
    trains = True
    packages: ClassVar[Mapping[str, str]] = {
        "iree.compiler": "iree-base-compiler",
        "iree.runtime": "iree-base-runtime",
    }
    install = "pip install 'dynamo-backends[iree]'"

    def __init__(self) -> None:
        self._culprits: set[str] = set()

    def availability(self) -> Availability:
        """See `Backend.availability`."""
        if no := self.check_packages():
            return no
        version = self.versions()["iree-base-compiler"]
        return Availability(True, f"IREE {version}", devices=("cpu",))

    def check_graph(self, graph: Graph, options: IreeOptions) -> None:
        """See `Backend.check_graph`."""
        require_cpu_inputs(graph, "iree")

    def preserved_operators(self, options: IreeOptions) -> Collection[OpOverload]:
        """See `Backend.preserved_operators`."""
        from dynamo_backends.iree.exclusions import WHOLE

        return WHOLE

    def decomposed_operators(self, options: IreeOptions) -> Collection[OpOverload]:
        """See `Backend.decomposed_operators`."""
        from dynamo_backends.iree.exclusions import DECOMPOSED

        return DECOMPOSED

    def plan(self, graph: Graph, options: IreeOptions) -> Plan:
        """See `Backend.plan`. Calls are tried together."""
        from dynamo_backends.iree.trial import verdict

        settings, beside = _settings(options), graph.calls
        answer = lambda node: verdict(node, settings, options.cache, beside).as_support  # noqa: E731
        return plan_per_call(graph, answer, self.name)

    def compile(self, graph: Graph, options: IreeOptions) -> Any:
        """See `Backend.compile`. What the compiler breaks down at is to be left out."""
        from dynamo_backends.iree.compiler import CompilerCrashError
        from dynamo_backends.runtime.ranged_calls import make_for_range

        try:
            return make_for_range(graph, lambda ranged: self._compile(graph, options, ranged))
        except CompilerCrashError as error:
            node = self._known_culprit(graph)
            if node is None:
                node = find_crashing_call(graph, lambda part: self._breaks(part, options))
                self._culprits.add(verdict_key(node))
            alone = len(graph.calls) == 1
            reason = (
                str(error)
                if alone
                else (f"{error} when compiled together with the preceding operators")
            )
            raise LoweringError(node.name, str(node.target), reason) from error

    def _compile(self, graph: Graph, options: IreeOptions, ranged: bool) -> Any:
        from dynamo_backends.iree.runtime import executable_class
        from dynamo_backends.iree.session import open_device

        program, wiring = self._program(graph, options, ranged)
        return executable_class(ranged)(graph, program, wiring, open_device(options.num_threads))

    def _program(
        self, graph: Graph, options: IreeOptions, ranged: bool = False
    ) -> tuple[bytes, Any]:
        from dynamo_backends.iree.compiler import compile_program
        from dynamo_backends.iree.lowering import lower, to_mlir

        lowered = lower(graph, ranged=ranged)
        return compile_program(to_mlir(graph, lowered), _settings(options)), lowered.wiring

    def _breaks(self, graph: Graph, options: IreeOptions) -> bool:
        """Returns whether the compiler breaks down at a graph."""
        from dynamo_backends.iree.compiler import CompilerCrashError

        try:
            self._program(graph, options)
        except CompilerCrashError:
            return True
        except CompileError:  # another part of the graph will tell
            return False
        return False

    def _known_culprit(self, graph: Graph) -> fx.Node | None:
        """Returns a call of a kind that was found to be one before: layers repeat themselves."""
        return next((n for n in graph.calls if self._is_known(n)), None) if self._culprits else None

    def _is_known(self, node: fx.Node) -> bool:
        return isinstance(node.target, OpOverload) and verdict_key(node) in self._culprits

    def cache_key(self, options: IreeOptions) -> str:
        """See `SavesExecutables.cache_key`."""
        from dynamo_backends.runtime.cache import source_digest
        from dynamo_backends.runtime.cpu_info import cpu_cache_key

        return f"{self.versions()} {source_digest()} {cpu_cache_key()}"

    def load(self, parts: Mapping[str, bytes], graph: Graph, options: IreeOptions) -> Any:
        """See `SavesExecutables.load`."""
        from dynamo_backends.iree.runtime import load
        from dynamo_backends.iree.session import open_device

        return load(parts, graph, open_device(options.num_threads))


def _settings(options: IreeOptions) -> Any:
    from dynamo_backends.iree.compiler import Settings

    return Settings(
        options.opt_level,
        options.data_tiling,
        options.compiler_flags,
        float(options.compile_seconds),
    )
