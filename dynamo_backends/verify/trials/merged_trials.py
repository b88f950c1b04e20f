"""Trials of many calls side by side in one program.

Most of what compiling takes is the same for one small call and for thirty. So calls about which
nothing is known are compiled into one program, in which none reads what another one computes; each
is run on all its samples and judged as if it were alone. Those that are right are known to be.
About the others nothing is said: they are tried alone, which also tells why they fail.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.graph.planned_decomposition import Rules, compile_decomposed
from dynamo_backends.interface.errors import LoweringError
from dynamo_backends.verify import restore_rng, snapshot_rng
from dynamo_backends.verify.trials.call_trials import (
    Compile,
    Spare,
    count_elements,
    is_matmul_or_conv,
    is_run_in_trial,
    sanitized_samples,
    single_call_graph,
)
from dynamo_backends.verify.trials.judge import EagerRefusedError, Expectation, Judge, Run

log = logging.getLogger("dynamo_backends")

TOGETHER = 32
"""So many calls are compiled in one program at most."""

ELEMENTS = 1 << 23
"""So many elements are read and written by the calls of one program at most, if it is run."""

Make = Callable[[Graph, Sequence[str]], Run]
"""Compiles a graph, given the names of the calls in it that are tried."""

Given = Callable[[], Iterable[list[Any]]]
"""What a call is run on, one list for each run (see `samples`)."""


@dataclass(frozen=True)
class Trial:
    """A call in a graph of its own, and the inputs to run it on.

    Attributes:
        node: The call.
        graph: The call alone.
        given: What it is run on; None: it is compiled only.
    """

    node: fx.Node
    graph: Graph
    given: Given | None


def make_trial(node: fx.Node, spare: Spare, given: Given | None = None) -> Trial:
    """Makes a trial of a call: its own graph, and samples unless it is too large to run.

    Args:
        node: The call (see `smaller`); if it is too large even so, it is compiled only.
        spare: Takes what is accepted as a difference out of an input.
        given: What it is run on instead of samples, however large it is.
    """
    if given is None and is_run_in_trial(node):
        given = lambda: sanitized_samples(node, spare)  # noqa: E731
    return Trial(node, single_call_graph(node), given)


def make_binding_compiler(compile_graph: Compile) -> Make:
    """Returns a function that compiles a graph of calls and binds no weights.

    Args:
        compile_graph: Makes an executable.
    """
    return lambda graph, names: compile_graph(graph).bind(())[0]


def make_decomposing_binder(compile_graph: Compile, rules: Callable[[], Rules]) -> Make:
    """Returns a function that decomposes a graph's calls, then compiles and binds it.

    Args:
        compile_graph: Makes an executable of what they become.
        rules: How operators are decomposed in turn that come up inside.
    """
    return lambda graph, names: compile_decomposed(graph, names, rules(), compile_graph).bind(())[0]


def run_merged_trials(trials: Mapping[str, Trial], make: Make) -> set[str]:
    """Compiles and runs trials merged into few graphs; returns the kinds that are right.

    Args:
        trials: By their kinds.
        make: Compiles them.
    """
    found: set[str] = set()
    for group in _groups(trials):
        found |= _right(group, make)
    return found


Group = dict[str, Trial]


def _groups(trials: Mapping[str, Trial]) -> Iterator[Group]:
    """Trials that are made in one program: those that are run alike, the small ones first."""
    alike: dict[tuple[bool, bool], Group] = {}
    for kind, trial in trials.items():
        if trial.graph.outputs:
            runs = trial.given is not None
            alike.setdefault((runs, runs and is_matmul_or_conv(trial.node)), {})[kind] = trial
    for (runs, _), group in alike.items():
        yield from _portions(group, ELEMENTS if runs else None)


def _portions(group: Group, most: int | None) -> Iterator[Group]:
    portion: Group = {}
    size = 0
    for kind, trial in sorted(group.items(), key=lambda item: count_elements(item[1].node)):
        count = count_elements(trial.node)
        too_much = most is not None and size + count > most
        if portion and (len(portion) == TOGETHER or too_much):
            yield portion
            portion, size = {}, 0
        portion[kind] = trial
        size += count
    yield portion


def _right(group: Group, make: Make) -> set[str]:
    """Returns the kinds of a group that are right; if the group fails, tries its halves."""
    if len(group) < 2:
        return set()
    try:
        return _right_in_one(group, make)
    except MemoryError:  # says nothing about the calls
        raise
    except LoweringError as error:
        log.debug("calls cannot be tried together", exc_info=True)
        left = {k: t for k, t in group.items() if str(t.node.target) != error.op}
        if 0 < len(left) < len(group):
            return _right(left, make)
    except Exception:  # of the vendor's; none may reach the user
        log.debug("calls cannot be tried together", exc_info=True)
    kinds = list(group)
    middle = len(kinds) // 2
    one, other = ({k: group[k] for k in half} for half in (kinds[:middle], kinds[middle:]))
    return _right(one, make) | _right(other, make)


def _right_in_one(group: Group, make: Make) -> set[str]:
    if any(trial.given is None for trial in group.values()):
        side_by_side = MergedCalls([trial.graph for trial in group.values()])
        make(side_by_side.graph, side_by_side.names)
        return set(group)
    state = snapshot_rng()
    try:
        turns = {kind: _Turns(trial) for kind, trial in group.items()}
        turns = {kind: turn for kind, turn in turns.items() if turn.next()}
        if len(turns) < 2:
            return set()
        side_by_side = MergedCalls([group[kind].graph for kind in turns])
        run = make(side_by_side.graph, side_by_side.names)
        waiting = list(turns.values())
        while any(turn.is_new for turn in waiting):
            results = run([x for turn in waiting for x in turn.args])
            for turn, own in zip(waiting, side_by_side.split(results), strict=True):
                turn.judge(own)
                turn.next()
        return {kind for kind, turn in turns.items() if turn.is_right}
    finally:
        restore_rng(state)


class MergedCalls:
    """One graph of several independent calls, with the inputs and outputs of all.

    Args:
        graphs: From `single_call_graph`.

    Attributes:
        graph: Has the inputs and outputs of all, in their order.
        names: Of the calls that are tried.
    """

    def __init__(self, graphs: Sequence[Graph]) -> None:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for i, one in enumerate(graphs):
            for place in one.placeholders:
                copies[place] = graph.placeholder(f"trial{i}_{place.name}")
                copies[place].meta = dict(place.meta)
        inputs = tuple(Input(place.name, Role.ACTIVATION) for place in copies.values())
        for one in graphs:
            for call in one.calls:
                copies[call] = graph.node_copy(call, copies.__getitem__)
        graph.output(tuple(copies[node] for one in graphs for node in one.outputs))
        self.graph = Graph(fx.GraphModule(torch.nn.Module(), graph), "inference", inputs)
        self.names = [copies[one.calls[0]].name for one in graphs]
        self._counts = [len(one.outputs) for one in graphs]

    def split(self, results: Sequence[Any]) -> list[Sequence[Any]]:
        """Splits the merged graph's results into one list per call."""
        found, start = [], 0
        for count in self._counts:
            found.append(results[start : start + count])
            start += count
        return found


class _Turns:
    """The samples of one call, one after the other, and what became of them.

    Attributes:
        args: Of the next run.
        is_new: They are a sample that was not judged yet.
    """

    def __init__(self, trial: Trial) -> None:
        self.args: list[Any] = []
        self.is_new = False
        self._judge = Judge(trial.graph)
        self._left = iter(trial.given() if trial.given is not None else ())
        self._expectation: Expectation | None = None
        self._judged, self._is_wrong = 0, False

    def next(self) -> bool:
        """Goes on to the next sample that eager takes, if there is one; the old one stays else."""
        self.is_new = False
        for args in () if self._is_wrong else self._left:
            with contextlib.suppress(EagerRefusedError):  # an operator does not take every number
                self._expectation = self._judge.run_eager(args)
                self.args, self.is_new = args, True
                break
        return self.is_new

    def judge(self, results: Sequence[Any]) -> None:
        """Judges results of the sample, unless that was done before."""
        if not self.is_new or self._expectation is None:
            return
        with contextlib.suppress(EagerRefusedError):  # in float64
            self._is_wrong = self._expectation.find_mismatch(results) is not None
            self._judged += 1

    @property
    def is_right(self) -> bool:
        """Returns whether every result that could be judged was right, and there was one."""
        return self._judged > 0 and not self._is_wrong
