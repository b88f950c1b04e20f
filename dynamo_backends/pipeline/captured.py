"""Compiles a graph that Dynamo captured: AOT Autograd, normal form, `CompiledGraph`."""

import dataclasses
import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.aot.autograd import compile_functional
from dynamo_backends.aot.inputs import (
    CaptureFacts,
    describe_inputs,
    inspect_captured,
    subclass_inputs,
    wrap_for_subclass_inputs,
)
from dynamo_backends.aot.traces import Traces, key_of
from dynamo_backends.aot.updates import wrap_with_row_writes
from dynamo_backends.graph.decomposition_tables import (
    checked_decomposition_table,
    decomposition_table,
)
from dynamo_backends.graph.donation import RowWrite, extract_row_writes, without_input_updates
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.index_checks import (
    ForwardValueRanges,
    IndexCheckedGraph,
    with_index_checks,
)
from dynamo_backends.graph.normalize import NormalizedGraph, normalize
from dynamo_backends.graph.seeded_draws import match_checkpoint_draws
from dynamo_backends.graph.symbols import guard_equal_sizes
from dynamo_backends.int8.capture import make_proof_wrapper
from dynamo_backends.interface import captures, protocols
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.counters import (
    AOT,
    CAPTURE,
    NORMAL_FORM,
    StageClock,
    time_stage,
    use_stage_clock,
)
from dynamo_backends.interface.errors import (
    CompileError,
    FallbackRefusedError,
    SaveError,
    UnknownBackendError,
    suppress_and_log,
)
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.publishing import publish
from dynamo_backends.interface.registry import get_backend, require_available
from dynamo_backends.interface.report import GraphReport, Kind
from dynamo_backends.pipeline import background
from dynamo_backends.pipeline.compiled_graph import (
    CompiledGraph,
    EagerGraph,
    fall_back_to_eager,
)
from dynamo_backends.pipeline.reporting import describe_symbols
from dynamo_backends.runtime.cache import source_digest
from dynamo_backends.runtime.device_tensor import accept_device_handles
from dynamo_backends.runtime.foreign_devices import compile_for_foreign_device
from dynamo_backends.runtime.index_checks import (
    wrap_raise_on_flag,
    wrap_rerun_in_eager,
    wrap_with_bounds_checks,
)
from dynamo_backends.runtime.residency import DeviceResidency, device_of_values

_captures = itertools.count(1)


def compile_captured(
    backend: Backend,
    captured: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
) -> Callable[..., Any]:
    """Compiles Dynamo's graph; returns a function with its calling convention.

    Args:
        backend: What compiles the graphs.
        captured: Dynamo's torch-level graph; regions that are marked in it
            (`torch.compiler.nested_compile_region`) are inlined.
        example_inputs: Its inputs, real tensors.
        options: An instance of `backend.Options`.

    Returns:
        A function with the calling convention of `captured`.

    Raises:
        BackendUnavailableError: The backend cannot run here.
        DeviceError: A tensor is on a device that nobody compiles for (see `foreign`).
        FallbackRefusedError: With `fallback="error"`, if anything would run in eager.
    """
    marked, captured = captured, private.inline_regions(captured)
    foreign = compile_for_foreign_device(backend, captured, example_inputs)
    if foreign is not None:
        return foreign
    number = next(_captures)
    try:
        return _compile_captured(backend, captured, marked, example_inputs, options, number)
    except Exception as error:
        differentiated = torch.is_grad_enabled() and any(
            isinstance(x, Tensor) and x.requires_grad for x in example_inputs
        )
        report = GraphReport(backend.name, "forward" if differentiated else "inference", number)
        stage = "compiling what Dynamo captured"
        compiled = fall_back_to_eager(captured.forward, captured, report, options, error, stage)
    publish(report)
    return compiled


def _compile_captured(
    backend: Backend,
    captured: fx.GraphModule,
    marked: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    number: int,
) -> Callable[..., Any]:
    require_available(backend)
    if isinstance(backend, protocols.CompilesCapturedGraphs):
        compiled = backend.compile_captured_graph(captured, example_inputs, options, number)
        if compiled is not None:
            return compiled
    try:
        proven = make_proof_wrapper(options, captured, example_inputs)
    except CompileError as error:
        return _left_to_eager(backend, captured, options, number, str(error))
    if isinstance(backend, protocols.Prefetches):
        backend.start_initialization(example_inputs, options)
    options, residency = _placement(backend, options, example_inputs)
    pipeline = _GraphPipeline(backend, options, inspect_captured(captured), number, residency)
    subclasses = subclass_inputs(example_inputs)
    complete = not subclasses and residency is None and proven is None
    compiled = _trace_and_compile(pipeline, captured, marked, example_inputs, complete)
    if pipeline.checked and not private.aot_cache_is_enabled():
        compiled = wrap_rerun_in_eager(compiled, captured)
    if residency is not None:
        compiled = residency.wrap_results(compiled)
    if subclasses:
        compiled = wrap_for_subclass_inputs(compiled, subclasses)
    return compiled if proven is None else proven(compiled, pipeline.reports)


def _placement(
    backend: Backend, options: Options, inputs: Sequence[Any]
) -> tuple[Any, DeviceResidency | None]:
    """Returns the options for where the inputs live, and which values stay on that device."""
    home = device_of_values(inputs)
    if home is not None:
        options = protocols.options_for_device(backend, options, home)
    stays = protocols.resident_device(backend, options)
    return options, None if home is None and stays is None else DeviceResidency(stays)


def _trace_and_compile(
    pipeline: "_GraphPipeline",
    captured: fx.GraphModule,
    marked: fx.GraphModule,
    example_inputs: Sequence[Any],
    complete: bool,
) -> Callable[..., Any]:
    """Traces what Dynamo captured to functional graphs, each of which the pipeline compiles."""
    options = pipeline.options
    keeps = frozenset(pipeline.backend.preserved_operators(options))
    checked = should_check_indices(example_inputs, pipeline.residency)
    rules = checked_decomposition_table if checked else decomposition_table
    # `keep_in_eager` may name what a traced graph does not, see `interface.operator_names`.
    is_kept = complete and options.cache and not options.keep_in_eager
    clock = StageClock()
    if (seconds := private.capture_seconds()) is not None:
        clock.add(CAPTURE, seconds)
    with accept_device_handles(), use_stage_clock(clock), time_stage(AOT):
        return compile_functional(
            captured,
            example_inputs,
            pipeline,
            rules(keep=keeps),
            options.partitioner,
            complete,
            Traces(key_of(captured, example_inputs, keeps)) if is_kept else None,
            marked,
        )


def _left_to_eager(
    backend: Backend, captured: fx.GraphModule, options: Options, number: int, reason: str
) -> Callable[..., Any]:
    """Eager in place of a graph that cannot be compiled as these options ask."""
    if options.fallback == "error":
        raise FallbackRefusedError(
            f'{backend.name} cannot compile a graph: {reason}. Pass fallback="eager" to run it in '
            "eager."
        )
    report = GraphReport(backend.name, "inference", number)
    report.reverted = f"{reason}; the graph runs in eager instead"
    report.ops_in_eager = sum(node.op.startswith("call_") for node in captured.graph.nodes)
    report.log_fallbacks()
    publish(report)
    return captured.forward


def compile_exported(
    backend: Backend,
    exported: fx.GraphModule,
    facts: CaptureFacts,
    options: Options,
    static: frozenset[int],
) -> tuple[Callable[[list[Any]], Sequence[Any]], GraphReport]:
    """Compiles a functional inference graph that Dynamo did not capture.

    Args:
        backend: What compiles it.
        exported: The graph; it updates none of its inputs.
        facts: What is known of its inputs.
        options: An instance of `backend.Options`.
        static: Which inputs are weights.

    Returns:
        A function from the list of inputs, which it clears, to the outputs; and its report.

    Raises:
        BackendUnavailableError: The backend cannot run here.
    """
    require_available(backend)
    pipeline = _GraphPipeline(backend, options, facts, next(_captures))
    report = GraphReport(backend.name, "inference", pipeline.number)
    return pipeline.contained(exported, "inference", static, report), report


@dataclasses.dataclass(frozen=True)
class _GraphPipeline:
    """The stages through which the functional graphs of one captured graph go.

    Its pickle is for a process that loads what was compiled instead of capturing it anew.

    Attributes:
        reports: One for each graph that it was given.
        checked: The kinds of those whose positions are checked at each call.
        facts_of_forward: What the checks of the forward graph say.
    """

    backend: Backend
    options: Options
    facts: CaptureFacts
    number: int
    residency: DeviceResidency | None = None
    reports: list[GraphReport] = dataclasses.field(default_factory=list, compare=False)
    checked: list[Kind] = dataclasses.field(default_factory=list, compare=False)
    facts_of_forward: ForwardValueRanges = dataclasses.field(
        default_factory=ForwardValueRanges, compare=False
    )

    def __call__(
        self, gm: fx.GraphModule, kind: Kind, static: frozenset[int]
    ) -> Callable[[list[Any]], Sequence[Any]]:
        if kind != "backward":  # which is compiled when Dynamo's guards are made
            guard_equal_sizes(gm.graph)
        report = GraphReport(self.backend.name, kind, self.number)
        self.reports.append(report)
        compiled = self.contained(gm, kind, static, report)
        return (
            compiled if self.residency is None else self.residency.wrap_compiled(compiled, gm.graph)
        )

    def contained(
        self, gm: fx.GraphModule, kind: Kind, static: frozenset[int], report: GraphReport
    ) -> Callable[[list[Any]], Sequence[Any]]:
        """Returns what runs a graph: eager, if preparing it fails."""
        try:
            with use_stage_clock(StageClock()) as clock:
                report.stage_seconds = clock.seconds
                return self._compile(gm, kind, static, report)
        except Exception as error:
            stage = "preparing the graph"
            compiled = fall_back_to_eager(EagerGraph(gm), gm, report, self.options, error, stage)
        publish(report)
        return compiled

    def _compile(
        self, gm: fx.GraphModule, kind: Kind, static: frozenset[int], report: GraphReport
    ) -> Callable[[list[Any]], Sequence[Any]]:
        backend, options = self.backend, self.options
        normalized = self._normalized(gm, kind, static)
        self._describe(normalized.graph, report)
        placed = self._placed(normalized.graph, [x.name for x in report.inputs])
        checks = self._checks(placed, normalized.constants)
        graph, rows = self._without_updates_outside(checks)
        compiled = CompiledGraph(
            backend,
            dataclasses.replace(normalized, graph=graph),
            options,
            report,
            self.facts.symbols,
        )
        compiled.checks = checks
        run = (
            background.prioritize_calls(compiled)
            if compiled.may_compile_in_background
            else compiled
        )
        written = wrap_with_row_writes(
            wrap_raise_on_flag(run, checks.flag), normalized.graph.updates, rows
        )
        eager = EagerGraph(normalized.graph.module, normalized.constants)
        return wrap_with_bounds_checks(written, checks.before, checks.flag, eager)

    def _normalized(
        self, gm: fx.GraphModule, kind: Kind, static: frozenset[int]
    ) -> NormalizedGraph:
        """Returns the graph in normal form, which the backend can compile for its devices."""
        backend, options = self.backend, self.options
        with time_stage(NORMAL_FORM):
            normalized = normalize(gm, kind, freeze=options.freezing != "off", static=static)
        if kind != "backward" and not normalized.graph.calls:
            captures.note_graph_without_operators()
        if protocols.resident_device(backend, options) is not None:
            match_checkpoint_draws(normalized.graph)
        backend.check_graph(normalized.graph, options)
        options.validate_graph(normalized.graph, backend.name)
        return normalized

    def _describe(self, graph: Graph, report: GraphReport) -> None:
        with suppress_and_log(report, "describing the inputs"):
            report.symbols = describe_symbols(graph)
            report.inputs = describe_inputs(graph, self.facts, self.options)
            report.output_aliases = self.facts.output_aliases if graph.kind != "backward" else ()

    def _without_updates_outside(
        self, checks: IndexCheckedGraph
    ) -> tuple[Graph, tuple[RowWrite, ...]]:
        """Returns the graph with the updates that its program makes, and rows written after it."""
        graph = checks.graph
        if self.residency is not None:  # rows would be written by torch, on the host
            return without_input_updates(graph), ()
        if checks.flag is not None:  # it is read before anything is written
            graph, rows = extract_row_writes(graph)
            return without_input_updates(graph), rows
        if protocols.donates(self.backend, graph, self.options):
            return graph, ()
        return extract_row_writes(graph)

    def _checks(self, graph: Graph, constants: Sequence[Tensor]) -> IndexCheckedGraph:
        """Returns the graph with what compiled code does not check."""
        if not should_check_indices(
            [place.meta.get("val") for place in graph.placeholders], self.residency
        ):
            return IndexCheckedGraph(graph)
        checks = with_index_checks(graph, constants, self.facts_of_forward)
        if checks.before is not None or checks.flag is not None:
            self.checked.append(graph.kind)
        return checks

    def _placed(self, graph: Graph, names: Sequence[str]) -> Graph:
        """Returns the graph with what the options say of its inputs' places on a mesh."""
        if not isinstance(self.backend, protocols.SpansMesh):
            return graph
        placed = self.backend.placements(graph, names, self.options)
        if not placed:
            return graph
        pairs = zip(graph.inputs, placed, strict=True)
        inputs = tuple(dataclasses.replace(x, placed=found) for x, found in pairs)
        return dataclasses.replace(graph, inputs=inputs)

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            found = get_backend(self.backend.name)
        except UnknownBackendError as error:
            raise pickle.PicklingError(f"{error} See register_backend.") from error
        if found is not self.backend:
            raise pickle.PicklingError(
                f"{self.backend.name!r} is registered for another backend in this process"
            )
        return _graph_pipeline, (source_digest(), self.backend.name, self.options, self.facts)


def should_check_indices(inputs: Sequence[Any], residency: DeviceResidency | None) -> bool:
    """Returns whether compiled code checks index bounds; only on the CPU.

    Elsewhere reading a flag would wait for the device; eager raises no error at that call, either.
    """
    return residency is None and all(
        x.device.type == "cpu" for x in inputs if isinstance(x, Tensor)
    )


def _graph_pipeline(
    version: str, name: str, options: Options, facts: CaptureFacts
) -> _GraphPipeline:
    if version != source_digest():
        raise SaveError(
            "this graph was saved by another version of dynamo_backends, which may trace it "
            "differently. Compile it again."
        )
    backend = get_backend(name)
    require_available(backend)
    return _GraphPipeline(backend, options, facts, next(_captures))
