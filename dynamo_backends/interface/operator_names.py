"""Parses the names by which users call operators: "aten.softmax.int" or "softmax".

A composite operator such as `aten.softmax` never reaches a functional graph: torch replaces it by
others (`aten._softmax`) while tracing. Its calls are then recognised by the function that the user
called, and by names that differ in leading underscores only.
"""

import functools
import re
from collections.abc import Collection, Sequence

from torch import fx

from dynamo_backends._torch_private import OpOverload, all_operator_names, composite_names
from dynamo_backends.interface.errors import OptionError, did_you_mean

_NUMBER = re.compile(r"_\d+$")


def check_operator_names(names: Sequence[str], option: str, backend: str) -> None:
    """Raises `OptionError` for a name that is not an operator's.

    Args:
        names: As the user wrote them.
        option: The option that they were given to, for the message.
        backend: Name of the backend, for the message.

    Raises:
        OptionError: A name is unknown; the message has the nearest.
    """
    if not names:
        return
    known = _known()
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise OptionError(
                f"option {option!r} of {backend} names an operator that does not exist, "
                f"{name!r}.{hint} Write it as 'aten.softmax.int', 'aten.softmax' or 'softmax'."
            )


def matches_operator_name(node: fx.Node, names: Collection[str]) -> bool:
    """Returns whether a call is of a named operator, or was decomposed from one."""
    return bool(names) and not _names(node).isdisjoint(_expanded(tuple(names)))


def _known() -> set[str]:
    known: set[str] = set()
    for name in all_operator_names():  # such as "aten::softmax.int"
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        known |= {f"{namespace}.{packet}", f"{namespace}.{packet}.{overload or 'default'}"}
        if namespace == "aten":
            known |= {packet, _bare(packet)}
    return known


@functools.cache
def _expanded(names: tuple[str, ...]) -> frozenset[str]:
    """The names themselves, and for each composite operator the bare one that its parts have."""
    composite = composite_names()
    bare = {_bare(name) for name in names if "." not in name}
    bare |= {_bare(name.split(".")[1]) for name in names if name in composite}
    return frozenset(names) | {f"*{name}" for name in bare}


def _names(node: fx.Node) -> set[str]:
    names: set[str] = set()
    for op in (node.target, node.meta.get("original_aten")):
        if isinstance(op, OpOverload):
            packet = str(op.overloadpacket)
            names |= {str(op), packet, f"*{_bare(packet.split('.')[-1])}"}
    for called, function in node.meta.get("source_fn_stack") or ():
        # "softmax_1" is the second call of softmax in the graph that Dynamo captured
        names.add(f"*{_bare(_NUMBER.sub('', called))}")
        name = function if isinstance(function, str) else getattr(function, "__name__", "")
        names.add(f"*{_bare(name)}")
    return names


def _bare(name: str) -> str:
    return name.strip("_")
