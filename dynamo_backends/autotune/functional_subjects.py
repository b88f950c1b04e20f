"""Subjects that the pipeline makes: a functional graph, and a whole training step.

Inputs are known at the first call; who runs the graph is decided there (see `executables`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends.aot.inputs import value_text
from dynamo_backends.aot.step.program.backends import compile_whole, step_backend
from dynamo_backends.aot.step.program.programs import CopyingProgram
from dynamo_backends.autotune.candidates import Candidate, iter_candidates
from dynamo_backends.autotune.options import NOT_COMPILED, AutotuneOptions
from dynamo_backends.autotune.session import PreparedCandidate, Workload, why_failed
from dynamo_backends.autotune.trial_inputs import TrialInputs
from dynamo_backends.autotune.tuning_subjects import TuningKey, TuningSubject, try_flop_features
from dynamo_backends.autotune.verification import VerificationCase, verify_on_cases
from dynamo_backends.graph.call_decomposition import decompose_call, decompose_graph
from dynamo_backends.graph.call_tracing import CallTraceCache
from dynamo_backends.graph.decomposition_tables import decomposition_table
from dynamo_backends.graph.fingerprint import fingerprint
from dynamo_backends.graph.graph import WEIGHT_ROLES, Graph, Role, user_lines
from dynamo_backends.graph.lstm import without_lstm_workspaces
from dynamo_backends.interface import protocols
from dynamo_backends.interface import report as reporting
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.errors import DynamoBackendsError, brief_error
from dynamo_backends.interface.executable import StepProgram
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.publishing import log_structured_trace
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.interface.report import CandidateReport, GraphReport
from dynamo_backends.pipeline.program_builder import InductorBlockBackend
from dynamo_backends.runtime.results import Results
from dynamo_backends.verify import module_in_float64, restore_rng, snapshot_rng
from dynamo_backends.workers.progress import COUNTS
from dynamo_backends.workers.race import Run

log = logging.getLogger("dynamo_backends")

_FORWARD_SHARE = 0.5  # of what is left of the budget; the rest is for its backward graph

_WEIGHTS = WEIGHT_ROLES | {Role.MUTATED}


class FunctionalGraphSubject(TuningSubject):
    """A functional ATen graph (inference, forward or backward) that is tuned.

    Candidates compile the whole graph through the pipeline's program builder, so each has its own
    partition and its own operators in eager. All start from the same trace:
    `Autotune.preserved_operators` has AOT Autograd decompose nothing that a candidate may want
    whole.

    Args:
        graph: With static shapes, undecomposed.
        options: Options of autotune.

    Attributes:
        report: Report of the graph.
        programs: What candidates have compiled for a session, by their names.
    """

    def __init__(self, graph: Graph, options: AutotuneOptions):
        self.graph = graph
        self.options = options
        self.budget_share = _FORWARD_SHARE if graph.kind == "forward" else 1.0
        self.programs: dict[str, Run] = {}
        self._reports: dict[str, GraphReport] = {}
        results, module = Results(graph), graph.module
        self.eager: Run = lambda values: results(module(*values))

    @property
    def title(self) -> str:
        """See `TuningSubject.title`."""
        return f"{self.graph.kind} graph with {len(self.graph.calls)} operators"

    @cached_property
    def _devices(self) -> list[str]:
        values = [place.meta["val"] for place in self.graph.placeholders]
        return sorted({v.device.type for v in values if isinstance(v, Tensor)} or {"cpu"})

    @cached_property
    def competing(self) -> list[Candidate]:
        """See `TuningSubject.competing`."""
        infers = self.graph.kind == "inference"
        return [
            c
            for c in iter_candidates(self.options, self._devices)
            if (c.owner == "ours" or c.backend == InductorBlockBackend.name)
            and not c.is_bfloat16
            and (infers or c.trains)
        ]

    @cached_property
    def key(self) -> TuningKey:
        """See `TuningSubject.key`."""
        graph = self.graph
        places = zip(graph.placeholders, graph.inputs, strict=True)
        return TuningKey(
            graph.kind,
            fingerprint(graph),
            len(graph.calls),
            tuple(value_text(p.meta["val"]) for p, x in places if x.role not in _WEIGHTS),
            self._devices,
            lines=lambda: user_lines(graph.module.graph),
            work=try_flop_features(graph.module),
        )

    @property
    def weight_positions(self) -> list[int]:
        """Returns the positions of parameters, buffers, and inputs that the graph updates."""
        return [i for i, x in enumerate(self.graph.inputs) if x.role in _WEIGHTS]

    def make_workload(self, values: list[Any]) -> Workload:
        """Makes the workload that candidates are verified and timed on.

        Args:
            values: Inputs; not changed.
        """
        precise = module_in_float64(self.graph.module)
        arguments = TrialInputs(values, self.weight_positions, ())
        title = f"autotune: {self.title}"
        return Workload(self.eager, lambda args: precise(*args), arguments, title=title)

    def prepare_candidate(self, candidate: Candidate, workload: Workload) -> PreparedCandidate:
        """See `TuningSubject.prepare`."""
        return PreparedCandidate(
            candidate.name,
            lambda: self.compile_candidate(candidate),
            failed=lambda: why_failed([self._reports[candidate.name]]),
        )

    def compile_candidate(self, candidate: Candidate) -> Run:
        """Compiles the graph with a candidate; unsupported calls run in eager."""
        from dynamo_backends.pipeline.program_builder import build_program

        backend, options = self.backend_and_options(candidate)
        number = self.report.capture if self.report is not None else 0
        report = GraphReport(candidate.name, self.graph.kind, number)
        self._reports[candidate.name] = report
        graph = decompose_for_backend(self.graph, backend, options)
        with private.keeping_unused_draws(), reporting.isolate_trial_reports():
            run = build_program(backend, graph, options, report)
        self.programs[candidate.name] = run
        return run

    def backend_and_options(self, candidate: Candidate) -> tuple[Backend, Options]:
        """Returns a candidate's backend for functional graphs, and its options."""
        if candidate.owner != "ours":
            return InductorBlockBackend(), Options(**self.options.common_settings())
        backend = get_backend(candidate.backend)
        options = protocols.single_process_options(backend, candidate.backend_options(self.options))
        return backend, options

    # Reports.

    def report_choice(
        self, winner: str, rows: tuple[CandidateReport, ...], seconds: Mapping[str, float]
    ) -> None:
        """Writes the winner, measurements and fallbacks to the graph's report.

        What was compiled for the session is dropped.
        """
        report, own = self.report, self._reports.get(winner)
        self._reports.clear()
        self.programs.clear()
        if report is None:
            return
        report.candidates += rows
        report.tuning_seconds = seconds
        names = dict.fromkeys([*filter(None, report.chosen.split(", ")), winner])
        report.chosen = ", ".join(names)
        if own is not None:
            report.fallbacks += own.fallbacks
            report.ops_in_eager += own.ops_in_eager
            report.ops_on_backend -= own.ops_in_eager
            report.executables += own.executables - 1
            report.cache_hits += own.cache_hits
            report.failures += own.failures
            # The program goes on reporting to its own.
            own.failures, own.events = report.failures, report.events
        self._count_if_eager(winner)
        log_structured_trace(report, "autotune")

    def report_change(
        self, winner: str, rows: tuple[CandidateReport, ...], seconds: Mapping[str, float]
    ) -> None:
        """Writes a later winner, as of real steps, to the graph's report."""
        report = self.report
        if report is not None:
            report.candidates, report.chosen = rows, winner
            report.tuning_seconds = seconds
            self._count_if_eager(winner)
            log_structured_trace(report, "autotune")

    def _count_if_eager(self, winner: str) -> None:
        if self.report is not None and winner in NOT_COMPILED:
            self.report.ops_in_eager += len(self.graph.calls)
            self.report.ops_on_backend = 0


def decompose_for_backend(graph: Graph, backend: Backend, options: Options) -> Graph:
    """Copies a graph and decomposes in it what a backend does not keep whole.

    Args:
        graph: With static shapes.
        backend: The backend.
        options: Its options.
    """
    from dynamo_backends.graph.passes import PASSES

    rules = decomposition_table(keep=frozenset(backend.preserved_operators(options)))
    result, traces = graph.copy(), CallTraceCache()
    for node in result.calls:
        if node.target in rules and not node._erased:
            decompose_call(node, rules, traces)
    PASSES(result)
    result.module.recompile()
    return result


class TrainingStepSubject(FunctionalGraphSubject):
    """A whole training step (forward, backward, optimizer) that is tuned.

    As a `FunctionalGraphSubject` it is what can run in parts and without gradients; that a
    candidate compiles as a functional graph. Backends with steps of their own also compile it so
    that it overwrites parameters and state.

    Args:
        graph: Graph of the kind "step", undecomposed.
        options: Options of autotune.
    """

    def __init__(self, graph: Graph, options: AutotuneOptions):
        super().__init__(without_lstm_workspaces(graph), options)
        self.step = graph

    def compile_step(self, candidate: Candidate) -> StepProgram:
        """Compiles the step in place if the candidate can, else as a functional graph."""
        try:
            return self.compile_in_place_step(candidate)
        except DynamoBackendsError as error:
            log.debug(
                "%s returns step results out of place, so they are copied: %s",
                candidate.name,
                error,
            )
        return CopyingProgram(self.graph, self.compile_candidate(candidate))

    def compile_in_place_step(self, candidate: Candidate) -> StepProgram:
        """Compiles the step so that it writes parameters and state in place.

        Raises:
            DynamoBackendsError: The candidate does not compile this step so.
        """
        if candidate.owner != "ours":
            torchs = step_backend(candidate.backend, None)
            return torchs.compile(decompose_graph(self.step, torchs.decompositions))
        backend, options = self.backend_and_options(candidate)
        return compile_whole(backend, options, decompose_for_backend(self.step, backend, options))

    def make_eager_step(self) -> StepProgram:
        """Makes a program that runs the step in eager and copies the results back."""
        return self._copying(self.step, self.step.module)

    def _copying(self, graph: Graph, module: Callable[..., Any]) -> StepProgram:
        return CopyingProgram(graph, lambda inputs: module(*inputs))


# What backends make of a step is not what they make of the functional graph that competes, so it is
# proven right by itself, by the same rule and before it takes a real step.
class StepVerifier:
    """Compares compiled steps with eager's; the eager reference is made on first use.

    Args:
        subject: The step.
        inputs: Inputs of the step, which is taken on copies of them.
    """

    def __init__(self, subject: TrainingStepSubject, inputs: Sequence[Tensor]):
        self._subject = subject
        self._inputs = inputs

    @cached_property
    def _trials(self) -> list[VerificationCase]:
        subject, graph = self._subject, self._subject.graph
        precise = module_in_float64(graph.module)
        updated = {i for i, x in enumerate(graph.inputs) if x.updated_by is not None}
        return Workload(
            _run(subject._copying(graph, graph.module)),
            _run(subject._copying(graph, precise)),
            TrialInputs(self._inputs, subject.weight_positions, updated),
        ).make_cases()

    def find_mismatch(self, program: StepProgram) -> str:
        """Runs a step on copies; returns what is wrong, or "" if nothing is."""
        COUNTS.add(verified=1)
        rng = snapshot_rng()
        try:
            return verify_on_cases(self._trials, _run(program)).wrong
        except Exception as error:
            return f"it raised {brief_error(error)}"
        finally:
            restore_rng(rng)


def _run(program: StepProgram) -> Run:
    def run(inputs: list[Any]) -> list[Tensor]:
        taken: list[Any] = []
        with torch.enable_grad():  # as real steps are taken; programs detach what they get
            program(inputs, taken)
        return program.outputs(taken)

    return run
