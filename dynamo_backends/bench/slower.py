"""Why a compiled model is slower than eager, as far as times of its parts tell."""

import re
import statistics
from collections.abc import Iterator

from dynamo_backends.bench.explained import Times
from dynamo_backends.capture.explanation import Explanation

_TELLING = 0.1  # of a call
_PART = re.compile(r" (block|eager) \d+$")  # see `runtime.profiled`


def why_slower(explanation: Explanation, times: Times) -> tuple[str, ...]:
    """Returns what makes calls slower than in eager, in sentences; none if they are not.

    Args:
        explanation: What became of the model.
        times: What was measured of it.
    """
    found = times.call.speedup
    return () if found is None or found.high >= 1 else tuple(_reasons(explanation, times))


def _reasons(explanation: Explanation, times: Times) -> Iterator[str]:
    eager, own = (statistics.median(s) for s in (times.call.eager_s, times.call.compiled_s))
    outside = statistics.median(times.outside.compiled_s)
    trains = any(report.kind == "backward" for report in explanation.reports)
    if outside > _TELLING * own and not trains:  # else it holds the backward graphs
        yield (
            f"{outside / own:.0%} of a call are outside of graphs: Dynamo's guards, and what it "
            f"leaves to eager."
        )
    in_eager, on_backend = _by_place(times)
    if in_eager > _TELLING * own:
        yield f"{in_eager / own:.0%} of a call are operators in eager between the blocks."
    padded = sum(s.calls for r in explanation.reports for s in r.served if s.by == "padded")
    if padded:
        yield (
            f"{padded} of its calls were padded: their programs compute more positions than there "
            f"are. Sizes that come again get programs of their own."
        )
    if on_backend > eager:
        yield (
            f"The programs of {explanation.backend} alone take {on_backend * 1e3:.3g} ms a call, "
            f"and eager's kernels {eager * 1e3:.3g}: this model is not one that it makes faster. "
            f'backend="autotune" keeps eager where nothing is faster.'
        )


def _by_place(times: Times) -> tuple[float, float]:
    """Seconds of a call in parts in eager, and in blocks or graphs of one block."""
    places = {True: 0.0, False: 0.0}
    wholes = {_PART.sub("", name) for name in times.parts if _PART.search(name)}
    for name, seconds in times.parts.items():
        if name not in wholes:
            places[" eager " in name] += seconds
    return places[True], places[False]
