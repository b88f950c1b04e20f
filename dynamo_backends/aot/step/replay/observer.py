"""What a recorded call does below: the operators that it consists of."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Observer(TorchDispatchMode):
    """Watches the operators of one call.

    Attributes:
        mutates: Whether one writes to its arguments.
        draws: Whether one draws random numbers.
        reads: Whether a shape, or Python code, depends on the contents of a tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mutates = self.draws = self.reads = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Executes an operator."""
        tags = func.tags
        self.mutates |= func._schema.is_mutable
        self.draws |= torch.Tag.nondeterministic_seeded in tags
        self.reads |= (
            torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        )
        return func(*args, **(kwargs or {}))
