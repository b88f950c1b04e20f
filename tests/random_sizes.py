"""Random programs at several sizes: what a backend computes, with no other look at it, is eager's.

    python -m tests.random_sizes --count 1000 --backend onnxrt --seed 0

Of each program that differs the source is printed.
"""

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st
from rich.progress import Progress
from torch import Tensor

import dynamo_backends
from dynamo_backends.verify import describe_difference, widen_to_float64
from dynamo_backends.verify.mismatch import describe_layout_mismatch, describe_nonfinite_mismatch
from tests.graph.sized_programs import SizedProgram, sized_programs

SEED = 20261125
Run = Callable[..., Any]


@dataclass
class Tally:
    """What the programs of a run came to."""

    programs: int = 0
    calls: int = 0
    graphs: int = 0
    executables: int = 0
    torchs_own: int = 0
    failures: list[str] = field(default_factory=list)


def check_program(program: SizedProgram, backend: str, dynamic: bool | None, tally: Tally) -> None:
    """Compares a program at each of its sizes with eager's results.

    Raises:
        AssertionError: They differ, or compiled code failed.
    """
    compile_with = dynamo_backends.compiler(
        backend, cache=False, min_block_size=1, verify="off", fragmented="keep"
    )
    with dynamo_backends.record() as reports:
        wrong = _first_difference(program, compile_with, dynamic)
    failed = [str(f) for report in reports for f in report.runtime_fallbacks]
    tally.programs += 1
    tally.calls += len(program.sizes)
    tally.graphs += len(reports)
    tally.executables += sum(r.executables for r in reports)
    wrong = wrong or "; ".join(failed)
    if wrong and not failed and _first_difference(program, "aot_eager", dynamic):
        tally.torchs_own += 1
        return
    assert not wrong, wrong


def _first_difference(program: SizedProgram, backend: Any, dynamic: bool | None) -> str:
    """Where compiled code differs from eager; empty: nowhere."""
    torch._dynamo.reset()
    function = program.function()
    run = torch.compile(function, backend=backend, dynamic=dynamic)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sizes in program.sizes:
            inputs = program.inputs_of(sizes)
            expected = function(*program.inputs_of(sizes))
            precise = function(*map(widen_to_float64, inputs))
            try:
                results = run(*inputs)
            except Exception as error:
                return f"{sizes}: {type(error).__name__}: {error}"
            wrong = _difference(expected, results, precise)
            if wrong:
                return f"{sizes}: {wrong}"
    return ""


def _difference(
    expected: Sequence[Tensor], results: Sequence[Tensor], precise: Sequence[Tensor]
) -> str:
    for i, (e, r) in enumerate(zip(expected, results, strict=True)):
        wrong = describe_layout_mismatch(e, r, None) or describe_nonfinite_mismatch(e, r)
        if wrong:
            return f"output {i} {wrong}"
    return describe_difference(expected, results, precise) or ""


def run_many(
    count: int,
    seed: int,
    backend: str,
    go_on: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> Tally:
    """Checks `count` random programs.

    Args:
        count: How many.
        seed: Of the programs.
        backend: Any backend's name.
        go_on: Failures are collected, rather than the first one made small and raised.
        progress: Called after each program.

    Raises:
        AssertionError: One differs from eager; its note has the smallest such program.
    """
    tally = Tally()

    @with_seed(seed)
    @settings(
        max_examples=count, deadline=None, database=None, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate] if go_on else [Phase.generate, Phase.shrink],
    )  # fmt: skip
    @given(sized_programs(), st.sampled_from((True, True, None)))
    def each(program: SizedProgram, dynamic: bool | None) -> None:
        text = f"{program.source()}sizes: {program.sizes}, dynamic={dynamic}"
        note(text)
        try:
            check_program(program, backend, dynamic, tally)
        except AssertionError as error:
            if not go_on:
                raise
            inputs = "\n".join(x.source() for x in program.inputs)
            tally.failures.append(f"{text}\n{inputs}\n{error}")
            print(f"\n{tally.failures[-1]}", flush=True)
        progress()

    with torch._dynamo.config.patch(recompile_limit=64):
        each()
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--backend", default="onnxrt", metavar="NAME")
    arguments = parser.parse_args()
    os.environ["DYNAMO_BACKENDS_CHECK"] = "1"
    logging.getLogger("dynamo_backends").setLevel(logging.ERROR)
    print(f"{arguments.count} random programs for {arguments.backend}, seed {arguments.seed}")
    start = time.process_time()
    with Progress() as bar:
        task = bar.add_task("checking", total=arguments.count)
        advance = lambda: bar.advance(task)  # noqa: E731
        tally = run_many(arguments.count, arguments.seed, arguments.backend, True, advance)
    print(
        f"{len(tally.failures)} differences in {tally.programs} programs and {tally.calls} calls "
        f"({tally.graphs} graphs, {tally.executables} executables; {tally.torchs_own} are torch's "
        f"own; {time.process_time() - start:.0f} s of CPU time)"
    )
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
