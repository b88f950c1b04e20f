"""A compiled program, and how a graph's inputs reach it."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from dynamo_backends.tvm.vendor import relax

PREPARE = "main_transform_params"


@dataclass(frozen=True)
class RelaxProgram:
    """A compiled Relax program, with its constants.

    Attributes:
        module: TVM's runtime module.
        activations: Positions among the graph's inputs of those that it takes.
        weights: Likewise.
        transformed: For each of these weights: whether its contents are read when it is bound.
        tuned: How many of its functions have a schedule that tuning has found.
        settled: Nothing is left to be tuned, so that it may be kept on disk.
        ranged: It serves all sizes that the symbols of its graph allow.
    """

    module: Any
    activations: tuple[int, ...]
    weights: tuple[int, ...]
    transformed: tuple[bool, ...]
    tuned: int = 0
    settled: bool = True
    ranged: bool = False

    def wiring(self) -> str:
        """Serializes the signature of the program, all but its module, as JSON."""
        fields = [f.name for f in dataclasses.fields(self) if f.name != "module"]
        return json.dumps({name: getattr(self, name) for name in fields})


def transformed(module: Any, count: int) -> tuple[bool, ...]:
    """Returns for each weight whether the lifted preparation function reads it.

    Args:
        module: A Relax module in which the preparation of weights has been lifted.
        count: Number of weights.
    """
    if not count:
        return ()
    function = module[PREPARE]
    read = [False] * count
    names: dict[Any, int] = {}  # variables that are a weight itself
    for block in function.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.TupleGetItem) and value.tuple_value == function.params[0]:
                names[binding.var] = value.index
            elif isinstance(value, relax.Var) and value in names:
                names[binding.var] = names[value]
            elif not isinstance(value, relax.Tuple):
                for variable in relax.analysis.free_vars(value):
                    if variable in names:
                        read[names[variable]] = True
    return tuple(read)
