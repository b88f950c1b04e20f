"""Defines what candidates compete to run; here a function that Dynamo captured.

A subject says who competes, what a decision about it depends on, how a candidate compiles it, and
what the results are compared with. `GraphTuner` does the same with all of them; `graph_subjects`
has the two others, a functional graph and a step.
"""

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.aot.inputs import value_text
from dynamo_backends.autotune import warm_start
from dynamo_backends.autotune.candidates import Candidate, iter_candidates
from dynamo_backends.autotune.cost_model import CostModel, GraphFeatures
from dynamo_backends.autotune.decisions import (
    DecisionStore,
    captured_fingerprint,
    collect_environment,
    hash_json,
    value_signature,
)
from dynamo_backends.autotune.flop_features import compute_flop_features
from dynamo_backends.autotune.isolation import is_isolated, run_isolated
from dynamo_backends.autotune.options import EAGER, SPLIT, AutotuneOptions
from dynamo_backends.autotune.session import PreparedCandidate, Workload, why_failed
from dynamo_backends.autotune.symbolic_sizes import exact_size_bounds, has_symbols
from dynamo_backends.autotune.trial_inputs import TrialInputs, find_mutated_inputs
from dynamo_backends.graph.graph import user_lines
from dynamo_backends.int8.capture import placed
from dynamo_backends.interface import report as reporting
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.errors import CompileError, suppress_and_log
from dynamo_backends.interface.protocols import NamedBounds
from dynamo_backends.interface.report import CandidateReport, GraphReport, Kind
from dynamo_backends.verify.reference import captured_graph_in_float64
from dynamo_backends.workers.race import Run

log = logging.getLogger("dynamo_backends")


@dataclass(frozen=True)
class TuningKey:
    """What a decision is looked up by, and what is stored with it.

    Attributes:
        kind: Kind of graph, as in `Decision.graph`.
        graph_hash: Equal in every process; None: there is none, and decisions are not kept.
        ops: Number of calls in the graph.
        inputs: Data types and shapes of the inputs that are no weights, for people.
        devices: Types of the devices that tensors are on.
        facts: What else the decision depends on, in types that JSON has.
        capture_s: Seconds that Dynamo took for the graph.
        lines: Tells `Decision.lines`.
        work: See `compute_flop_features`.
    """

    kind: str
    graph_hash: str | None
    ops: int
    inputs: tuple[str, ...]
    devices: Sequence[str]
    facts: Mapping[str, Any] = field(default_factory=dict)
    capture_s: float | None = None
    lines: Callable[[], tuple[str, ...]] = tuple
    work: Mapping[str, float] = field(default_factory=dict)

    def make_cost_model(self) -> CostModel:
        """Makes the cost model of this graph from the decisions on disk."""
        return CostModel(DecisionStore().all(), GraphFeatures(self.kind, self.ops, self.work))

    def decision_key(self, competing: Sequence[Candidate], options: AutotuneOptions) -> str | None:
        """Hashes graph, candidates, options and environment; None if not cacheable."""
        if self.graph_hash is None:
            return None
        int8 = {"tolerance": repr(options.tolerance), "calibration": repr(options.calibration)}
        return hash_json(
            {
                "kind": self.kind,
                "graph": self.graph_hash,
                "candidates": {c.name: c.dependency_versions() for c in competing},
                "options": {**options.common_settings(), "cache": True},
                "objective": options.objective,
                "precision": options.precision,
                "environment": collect_environment(self.devices),
                **(int8 if options.is_int8 else {}),
                **self.facts,
            }
        )


def try_flop_features(graph: fx.GraphModule) -> dict[str, float]:
    """Returns the FLOP features of a graph; {} if counting fails."""
    with suppress_and_log(None, "describing a graph for autotune"):
        return compute_flop_features(graph)
    return {}


class TuningSubject(ABC):
    """What is tuned: a captured graph, a functional graph, or a training step.

    Attributes:
        options: Options of autotune.
        report: Where it is noted that a decision could not be read or kept, if anywhere.
        budget_share: Part of what is left of the budget that is for this subject.
        known_mutated: Positions of the inputs that the subject writes to, once that is known.
    """

    options: AutotuneOptions
    report: GraphReport | None = None
    budget_share = 1.0
    known_mutated: frozenset[int] | None = None

    @property
    @abstractmethod
    def title(self) -> str:
        """Returns a short description for logs, such as "forward graph with 9 operators"."""

    @property
    @abstractmethod
    def competing(self) -> list[Candidate]:
        """Returns the candidates that compete with eager."""

    @property
    @abstractmethod
    def key(self) -> TuningKey:
        """Returns what a decision about the subject is looked up by."""

    @abstractmethod
    def compile_candidate(self, candidate: Candidate) -> Run:
        """Compiles the subject with a candidate; raises if that fails."""

    @abstractmethod
    def prepare_candidate(self, candidate: Candidate, workload: Workload) -> PreparedCandidate:
        """Makes a candidate ready for a tuning session: its callbacks and limits."""

    def tuning_context(self) -> AbstractContextManager[Any]:
        """Returns the context manager that tuning runs in; by default one without effect."""
        return nullcontext()


class CapturedGraphSubject(TuningSubject):
    """A graph that Dynamo captured, which candidates compile whole.

    A graph that is differentiated is called with a forward and a backward pass together. One of its
    candidates, "split", is the pipeline's own way: AOT Autograd makes a forward and a backward
    graph, and for each of these the backends of this package and Inductor compete.

    Args:
        captured: The graph.
        example_inputs: Its inputs: real tensors, and symbols.
        options: Options of autotune.
        number: Number of the captured graph, for reports.
        split: The backend whose forward and backward graphs are chosen for separately, if the graph
            is differentiated; None: it is not.

    Attributes:
        kind: "inference" or "training".
        bounds: See `Candidate.compile`; by default the sizes of the inputs.
        first: The candidates that are tried first, in this order.
        compiled: What candidates have compiled, by their names.
        reports: What they report.
    """

    def __init__(
        self,
        captured: fx.GraphModule,
        example_inputs: Sequence[Any],
        options: AutotuneOptions,
        number: int,
        split: Backend | None = None,
    ):
        self.captured = captured
        self.example_inputs = example_inputs
        self.options = options
        self.number = number
        self.kind = "inference" if split is None else "training"
        self.values = [private.concretize_number(x) for x in example_inputs]
        self.bounds: NamedBounds | None = exact_size_bounds(captured, [self.values])
        self.first: Sequence[str] = ()
        self.devices = sorted({x.device.type for x in self.values if isinstance(x, Tensor)})
        self.ops = sum(node.op.startswith("call_") for node in captured.graph.nodes)
        self.reports: dict[str, list[GraphReport]] = {}
        self.compiled: dict[str, Callable[..., Any]] = {}
        self._split = split
        self._capture_s = private.capture_seconds()

    @property
    def title(self) -> str:
        """See `TuningSubject.title`."""
        return f"{self.kind} graph {self.number} with {self.ops} operations"

    @property
    def static_positions(self) -> frozenset[int]:
        """Returns the positions of parameters and buffers among the inputs."""
        return frozenset(private.captured_static_inputs(self.captured))

    @cached_property
    def competing(self) -> list[Candidate]:
        """See `TuningSubject.competing`.

        In training, backends of this package take part inside of "split". With symbols each takes
        part with a forward and a backward graph of its own: inside of "split" there is a choice for
        each set of sizes, in a call with them.
        """
        usable = list(iter_candidates(self.options, self.devices))
        if self._split is None:
            return usable
        usable = [c for c in usable if c.trains and not c.is_bfloat16]
        if has_symbols(self.captured):
            return usable
        foreign = [c for c in usable if c.owner != "ours"]
        if any(c.owner == "ours" or c.backend == "inductor" for c in usable):
            foreign.append(Candidate(SPLIT, SPLIT, "ours", self._split))
        return foreign

    @cached_property
    def key(self) -> TuningKey:
        """See `TuningSubject.key`."""
        static = self.static_positions
        inputs = [value_signature(v) if isinstance(v, Tensor) else repr(v) for v in self.values]
        return TuningKey(
            self.kind,
            captured_fingerprint(self.captured),
            self.ops,
            tuple(value_text(v) for i, v in enumerate(self.values) if i not in static),
            self.devices,
            {"inputs": inputs, "static": sorted(static)},
            self._capture_s,
            lines=lambda: user_lines(self.captured.graph),
            work=try_flop_features(self.captured),
        )

    def check_calibration(self) -> None:
        """Raises `OptionError` if a batch of calibration lacks what the model reads."""
        if self.options.is_int8:
            with contextlib.suppress(CompileError):  # candidates in int8 say that themselves
                placed(self.options, self.captured, self.example_inputs)

    # Starting from the winner of other sizes (see `warm_start`).

    @cached_property
    def _function_hash(self) -> str:
        return warm_start.hash_without_sizes(
            self.captured, self.values, self.static_positions, self.kind
        )

    def apply_warm_start(self) -> Sequence[str]:
        """Puts earlier winners of the same function, at other sizes, first.

        Returns:
            Who is to be tried whatever is left of the budget, until one is right.
        """
        names = {candidate.name for candidate in self.competing}
        self.first = [
            name for name in warm_start.ranked_candidates(self._function_hash) if name in names
        ]
        return self.first if has_symbols(self.captured) else ()

    def note_winner(self, winner: str, rows: Sequence[CandidateReport]) -> None:
        """Remembers the ranking for later graphs of the same function."""
        warm_start.note_ranking(self._function_hash, winner, rows)

    # The session.

    @contextmanager
    def tuning_context(self) -> Iterator[None]:
        """Leaves Dynamo's compilation context, and sets the grad mode of real calls."""
        mode = torch.no_grad() if self._split is None else torch.enable_grad()
        with private.suspending_compile_metrics(), private.disable_current_modes(), mode:
            yield

    def make_workload(
        self,
        arguments: TrialInputs | None = None,
        others: Sequence[TrialInputs] = (),
        counts: Sequence[int] = (),
    ) -> Workload:
        """Makes the workload that candidates are verified and timed on.

        Args:
            arguments: Other inputs than those of the call that is compiled.
            others: See `Workload`.
            counts: See `Workload`.
        """
        promised = _promised(self.captured)
        return Workload(
            self.wrap_for_session(self.captured.forward),
            self.wrap_for_session(captured_graph_in_float64(self.captured)),
            arguments or TrialInputs(self.values, self.static_positions, self.mutated_positions()),
            promised,
            None if self._split is None else len(promised),
            f"autotune: {self.title}",
            others=others,
            counts=counts,
        )

    def mutated_positions(self) -> frozenset[int]:
        """Returns the positions of mutated inputs; calls the graph once to find them."""
        if self.known_mutated is None:
            self.known_mutated = find_mutated_inputs(
                self.wrap_for_session(self.captured.forward), self.values
            )
        return self.known_mutated

    def wrap_for_session(self, compiled: Callable[..., Any]) -> Run:
        """Wraps a compiled graph to take a list; in training with its backward."""
        return wrap_with_backward(compiled) if self._split else lambda args: compiled(*args)

    def prepare_candidate(self, candidate: Candidate, workload: Workload) -> PreparedCandidate:
        """See `TuningSubject.prepare`."""
        name = candidate.name
        isolated = None
        if is_isolated(candidate, self.options):
            isolated = lambda: run_isolated(  # noqa: E731
                candidate, self.captured, workload.arguments, self.options, self._split is not None
            )
        return PreparedCandidate(
            name,
            lambda: self.compile_candidate(candidate),
            candidate.is_bfloat16,
            isolated,
            lambda: why_failed(self.reports.get(name, [])),
            early=self.first.index(name) if name in self.first else None,
            tolerance=self.options.tolerance if candidate.is_int8 else None,
            measured=lambda: self.reports[name][0].measured if self.reports.get(name) else {},
        )

    def compile_candidate(
        self, candidate: Candidate, options: AutotuneOptions | None = None
    ) -> Run:
        """Compiles the graph with a candidate, and collects its reports.

        Args:
            candidate: Which one.
            options: Other ones than those of the subject.
        """
        name, options = candidate.name, options or self.options
        with reporting.isolate_trial_reports() as self.reports[name]:
            compiled = candidate.compile(self.captured, self.example_inputs, options, self.bounds)
        self.compiled[name] = compiled
        reports, run = self.reports[name], self.wrap_for_session(compiled)

        def call(args: list[Any]) -> Sequence[Any]:
            # Backward graphs are compiled, and reported, at the first call, which is one as those
            # that follow, outside of Dynamo's capture.
            with reporting.isolate_trial_reports() as more, private.suspending_tracing_context():
                results = run(args)
            reports.extend(more)
            return results

        return call

    # Reports.

    def winner_reports(self, winner: str) -> list[GraphReport]:
        """Returns the winner's reports; makes one for a backend that reports nothing."""
        reports = self.reports.get(winner)
        if reports:
            return reports
        kind: Kind = "inference" if self._split is None else "forward"
        report = GraphReport(winner, kind, self.number)
        if winner == EAGER:
            report.ops_in_eager = self.ops
        else:
            report.ops_on_backend = self.ops
        return [report]

    def report_choice(
        self, reports: Sequence[GraphReport], winner: str, rows: tuple[CandidateReport, ...]
    ) -> None:
        """Writes the winner and all candidates' rows to the graph's reports."""
        for report in reports:
            report.tolerance = str(self.options.tolerance or "")
            if winner != SPLIT:
                report.chosen = winner
            if self._split is None:
                report.candidates = rows
            elif report.kind != "backward":
                marked = tuple(replace(row, graph="training") for row in rows)
                report.candidates = marked + report.candidates


def wrap_with_backward(compiled: Callable[..., Any]) -> Run:
    """Wraps a function so that it returns its outputs and its inputs' gradients."""

    def run(args: list[Any]) -> Sequence[Any]:
        leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
        outputs = compiled(*args)
        open_ones = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
        plain = [o.detach() if isinstance(o, Tensor) else o for o in outputs]
        if not open_ones:
            return plain
        tangents = [_tangent(o, i) for i, o in enumerate(open_ones)]
        return [*plain, *torch.autograd.grad(open_ones, leaves, tangents, allow_unused=True)]

    return run


def _tangent(output: Tensor, number: int) -> Tensor:
    """Returns a gradient to start from, the same for every candidate and dtype."""
    generator = torch.Generator().manual_seed(number)
    with private.disable_current_modes():  # one may be on that knows of no generators but its own
        numbers = torch.randn(output.shape, generator=generator, dtype=torch.float32)
    return numbers.to(output.device, output.dtype)


def _promised(captured: fx.GraphModule) -> list[Sequence[int] | None]:
    """Returns strides of the outputs when Dynamo traced the graph; None where symbolic."""
    outputs: Any = captured.graph.output_node().args[0]
    return [_strides(node) for node in outputs]


def _strides(node: Any) -> Sequence[int] | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    return value.stride() if all(isinstance(s, int) for s in value.stride()) else None
