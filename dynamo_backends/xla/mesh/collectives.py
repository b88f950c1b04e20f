"""The collectives in a compiled program, read off XLA's text of it."""

import math
import re

from dynamo_backends.interface.mesh_report import Collective

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_CALL = re.compile(rf" = (.*?) ({'|'.join(_KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")


def collectives_of(program: str) -> tuple[Collective, ...]:
    """What devices exchange, one entry for each kind that there is.

    Args:
        program: XLA's text of a module for one device: a line for each operation.
    """
    sizes: dict[str, list[int]] = {}
    for line in program.splitlines():
        if (found := _CALL.search(line)) is not None:
            arrays = [_bytes(*each) for each in _ARRAY.findall(found[1])]
            # What a start returns has its operands beside its results.
            size = max(arrays, default=0) if found[3] else sum(arrays)
            sizes.setdefault(found[2], []).append(size)
    return tuple(Collective(k, len(sizes[k]), sum(sizes[k])) for k in _KINDS if k in sizes)


def _bytes(letters: str, bits: str, shape: str) -> int:
    width = 1 if letters == "pred" else math.ceil(int(bits or 0) / 8)
    return width * math.prod(int(n) for n in shape.split(",") if n)
