"""Compiles a graph: lower it to Relax, fuse, schedule, and generate code."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from dynamo_backends._torch_private import disable_current_modes
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.errors import reraise_as_compile_error
from dynamo_backends.interface.logs import filter_stderr
from dynamo_backends.runtime.ranged_calls import make_for_range
from dynamo_backends.tvm.lowering import LoweredRelax, lower, plain_message
from dynamo_backends.tvm.lowering_ranged import lower_ranged
from dynamo_backends.tvm.program import RelaxProgram, transformed
from dynamo_backends.tvm.ranged import executable_class
from dynamo_backends.tvm.runtime import TvmExecutable
from dynamo_backends.tvm.schedules import schedule
from dynamo_backends.tvm.session import CHATTER, Settings, target, vector_lanes
from dynamo_backends.tvm.tuning import apply_tuned_schedules
from dynamo_backends.tvm.vendor import relax, tvm

_OPT_LEVEL = 3
_DISABLED = ["s_tir.StmtSimplify", "tirx.StmtSimplify"]
"""They cancel floating-point numbers: `(x + y) - y` and `x - x * 1.0`. LLVM simplifies all else."""


def compile_graph(graph: Graph, settings: Settings) -> TvmExecutable:
    """Compiles a graph of supported calls.

    Args:
        graph: For concrete shapes. Where these come from symbolic ones, one program serves a range.
        settings: How it is compiled and run.

    Raises:
        LoweringError: A call cannot be lowered; it names the node.
        CompileError: TVM cannot compile the graph.
    """
    return make_for_range(graph, lambda ranged: _compile(graph, settings, ranged))


def _compile(graph: Graph, settings: Settings, ranged: bool) -> TvmExecutable:
    with reraise_as_compile_error("TVM cannot compile the graph", plain_message):
        with disable_current_modes():
            program = build(graph, settings, ranged)
        return executable_class(ranged)(graph, program, settings)


def build(graph: Graph, settings: Settings, ranged: bool = False) -> RelaxProgram:
    """Returns the program of a graph; schedules of programs for a range are not tuned."""
    if ranged:
        settings = dataclasses.replace(settings, tune_trials=0, uses_records=False)
    with _compiling(settings):
        lowered = lower_ranged(graph) if ranged else lower(graph)
        module = _simplified(lowered)
        read = transformed(module, len(lowered.weights))
        fused = _fused(module)
    found = apply_tuned_schedules(fused, settings)  # which shows progress on stderr
    with _compiling(settings):
        module = schedule(found.module, settings.threads, vector_lanes())
        module = _sequential(_lowering())(module)
        compiled = tvm.compile(module, target=target(settings.threads), relax_pipeline=None)
    wiring = lowered.activations, lowered.weights, read
    return RelaxProgram(compiled.mod, *wiring, found.tuned, found.settled, ranged)


@contextlib.contextmanager
def _compiling(settings: Settings) -> Iterator[None]:
    context = tvm.transform.PassContext(opt_level=_OPT_LEVEL, disabled_pass=_DISABLED)
    with filter_stderr(CHATTER), target(settings.threads), context:
        yield


def _simplified(lowered: LoweredRelax) -> Any:
    """Relax functions in which what depends on weights alone is a function of its own."""
    transform = relax.transform
    passes = [
        transform.DecomposeOpsForInference(),
        transform.CanonicalizeBindings(),
        transform.DeadCodeElimination(),
    ]
    if lowered.weights:
        passes.append(transform.LiftTransformParams())
    return _sequential(passes)(lowered.module)


def _fused(module: Any) -> Any:
    """Relax functions of fused loops."""
    transform = relax.transform
    passes = [
        relax.backend.DispatchSampling(),
        relax.backend.DispatchSortScan(),
        transform.LegalizeOps(),
        transform.AnnotateTIROpPattern(),
        transform.FoldConstant(),
        transform.FuseOps(),
        transform.FuseTIR(),
        transform.DeadCodeElimination(),
    ]
    return _sequential(passes)(module)


def _lowering() -> list[Any]:
    """From Relax functions to the virtual machine's program."""
    transform = relax.transform
    return [
        transform.RewriteDataflowReshape(),
        transform.ToNonDataflow(),
        transform.RemovePurityChecking(),
        transform.CallTIRRewrite(),
        transform.StaticPlanBlockMemory(),
        transform.LowerAllocTensor(),
        transform.KillAfterLastUse(),
        transform.LowerRuntimeBuiltin(),
        transform.ComputePrimValue(),
        transform.VMShapeLower(),
        transform.AttachGlobalSymbol(),
    ]


def _sequential(*passes: Any) -> Any:
    return tvm.transform.Sequential([p for group in passes for p in group])
