"""What the inputs of a graph are for."""

import enum
from dataclasses import dataclass

from dynamo_backends.interface.mesh import Placed


class Role(enum.Enum):
    """What a graph input is."""

    ACTIVATION = "activation"  # differs from call to call
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"  # owned by the graph itself
    MUTATED = "mutated"  # a parameter or buffer that the graph itself updates
    TANGENT = "tangent"
    SAVED = "saved"  # handed from the forward to the backward graph
    SYMBOL = "symbol"  # a symbolic integer
    INTERMEDIATE = "intermediate"  # made by another part of the same captured graph
    OPTIMIZER_STATE = "optimizer state"  # these three: of whole training steps only
    GRADIENT = "gradient"
    HYPERPARAMETERS = "hyperparameters"


WEIGHT_ROLES = frozenset({Role.PARAMETER, Role.BUFFER, Role.CONSTANT})


@dataclass(frozen=True)
class Input:
    """One placeholder.

    Attributes:
        name: Name of the placeholder.
        role: What it is.
        frozen: The backend may prepare its value once (see `Options.freezing`).
        updated_by: Position of the output that takes its place. In a "step" graph, and in a block
            of an inference graph, the input's memory is donated to it. None: the input stays as it
            is.
        placed: Where it is on a mesh of devices (see `Backend.placements`); None: nothing is said.
    """

    name: str
    role: Role
    frozen: bool = False
    updated_by: int | None = None
    placed: Placed | None = None
