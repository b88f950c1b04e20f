"""Proposes schedules of a function: MetaSchedule's rules span the space, measurements lead the way.

Contractions are also tried with other tiles than that of the default schedule.

MetaSchedule's own search strategies copy programs by way of JSON, at which TVM 0.27 with tvm-ffi
0.1.15 crashes. Traces, rules and post-processors need none, so the search over them is here: some
schedules are drawn at random, the others are the fastest ones with some decisions drawn again.
"""

import random
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_backends.tvm.schedules import apply_default_schedule, tiles, with_tile
from dynamo_backends.tvm.session import target, vector_lanes
from dynamo_backends.tvm.vendor import structural_hash, tvm

_INTRINSICS = "tvm.s_tir.tensor_intrin"

_ATTEMPTS = 64
"""So many proposals in a row that are invalid or known end the search."""

_TILE = "tile"
_TILES = 12
"""So many sizes of tiles other than the default one are proposed, each after one of the rules'."""

_AT_RANDOM = 8
"""So many proposals are drawn at random first, and then every `_OFTEN`-th one."""

_OFTEN = 4
_PARENTS = 4
"""The fastest ones that others are made from."""

_SEEDS = 1 << 30


@dataclass(frozen=True)
class Proposal:
    """A schedule of a function that the search proposes.

    Attributes:
        function: It.
        trace: How it was scheduled, as JSON has it.
        mark: A hash of it, the same in all processes.
    """

    function: Any
    trace: Any
    mark: str


class Search:
    """Proposes schedules of one function.

    Args:
        function: Not scheduled.
        threads: That programs have.
        seed: Of what is drawn.
    """

    def __init__(self, function: Any, threads: int, seed: int):
        self._function = function
        self._threads = threads
        default = apply_default_schedule(function, threads, vector_lanes())
        self._random = random.Random(seed)
        self._seen = {structural_fingerprint(default)}
        self._best: list[tuple[float, str, Any]] = []
        self._count = 0
        self._tiles = tiles(function, vector_lanes())[1 : 1 + _TILES]
        self._spaces, self._finishes = _space(function, target(threads), seed + 1)

    def propose(self) -> Proposal | None:
        """A schedule that was not proposed yet; None if none is found any more."""
        self._count += 1
        while self._tiles and (self._count % 2 or not self._spaces):
            proposal = self._tile(self._tiles.pop(0))
            if proposal is not None and proposal.mark not in self._seen:
                self._seen.add(proposal.mark)
                return proposal
        for _ in range(_ATTEMPTS if self._spaces else 0):
            proposal = self._finished(self._drawn())
            if proposal is not None and proposal.mark not in self._seen:
                self._seen.add(proposal.mark)
                return proposal
        return None

    def tell(self, proposal: Proposal, seconds: float) -> None:
        """Says how long a proposal takes."""
        if isinstance(proposal.trace, dict):  # a tile, which has no decisions to be drawn again
            return
        self._best.append((seconds, proposal.mark, proposal.trace))
        self._best = sorted(self._best, key=lambda entry: entry[:2])[:_PARENTS]

    def _tile(self, size: tuple[int, int]) -> Proposal | None:
        try:
            return replayed(self._function, {_TILE: list(size)}, self._threads)
        except Exception:  # such a tile does not fit
            return None

    def _drawn(self) -> Any:
        """Returns a schedule before the post-processors; None if it is not valid."""
        at_random = self._count <= _AT_RANDOM or self._count % _OFTEN == 0
        plan = tvm.s_tir.Schedule(self._function, seed=1 + self._random.randrange(_SEEDS))
        if at_random or not self._best:
            trace, decisions = self._random.choice(self._spaces), {}
        else:
            parent = tvm.s_tir.Schedule(self._function)
            tvm.s_tir.Trace.apply_json_to_schedule(self._random.choice(self._best)[2], parent)
            trace = parent.trace.simplified(remove_postproc=True)
            decisions = dict(trace.decisions.items())
            for inst in self._random.sample(list(decisions), min(len(decisions), self._changes())):
                del decisions[inst]
        try:
            tvm.s_tir.Trace(trace.insts, decisions).apply_to_schedule(plan, remove_postproc=True)
        except Exception:  # what was drawn does not fit what was kept
            return None
        return plan

    def _changes(self) -> int:
        return self._random.choice((1, 1, 2, 3))

    def _finished(self, plan: Any) -> Proposal | None:
        if plan is None:
            return None
        plan.enter_postproc()
        try:
            if not all(finish.apply(plan) for finish in self._finishes):
                return None
            return replayed(self._function, _plain(plan.trace.as_json()), self._threads)
        except Exception:  # nor does every schedule have a valid end
            return None


def _plain(value: Any) -> Any:
    """Returns what TVM gives as JSON, in Python's own types."""
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tvm.tirx.IntImm | tvm.tirx.FloatImm):
        return value.value
    return str(value) if isinstance(value, str) else value


def replayed(function: Any, trace: Any, threads: int) -> Proposal:
    """Applies a recorded schedule trace to a function; raises if it does not fit.

    Args:
        function: Not scheduled.
        trace: MetaSchedule's, as JSON has it, or the rows and columns of a tile.
        threads: That the program has.
    """
    if isinstance(trace, dict):
        rows, columns = trace[_TILE]
        made = with_tile(function, threads, vector_lanes(), (int(rows), int(columns)))
    else:
        plan = tvm.s_tir.Schedule(function)
        tvm.s_tir.Trace.apply_json_to_schedule(trace, plan)
        made = plan.mod["main"].with_attr("tirx.is_scheduled", True)
    return Proposal(made, trace, structural_fingerprint(made))


def structural_fingerprint(function: Any) -> str:
    """Returns a hash of a function's structure, the same in all processes."""
    return f"{structural_hash(function) & (1 << 64) - 1:016x}"


def _space(function: Any, processor: Any, seed: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Traces that span the space of schedules, and the post-processors."""
    # Its import takes minutes beside torch, and these rules use no intrinsics.
    sys.modules.setdefault(_INTRINSICS, types.ModuleType(_INTRINSICS))
    from tvm.s_tir import meta_schedule

    finishes = [
        meta_schedule.postproc.DisallowDynamicLoop(),
        meta_schedule.postproc.RewriteParallelVectorizeUnroll(),
        meta_schedule.postproc.RewriteReductionBlock(),
    ]
    generator = meta_schedule.space_generator.PostOrderApply(
        lambda block: True, sch_rules="llvm", postprocs=finishes, mutator_probs={}
    )
    context = meta_schedule.TuneContext(
        mod=function, target=processor, space_generator=generator, num_threads=1, rand_state=seed
    )
    spaces = context.generate_design_space()
    return [plan.trace.simplified(remove_postproc=True) for plan in spaces], finishes
