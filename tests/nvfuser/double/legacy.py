"""The frontend `nvfuser`: operations are methods of an object that each definition has."""

from typing import Any

from torch import Tensor

from tests.nvfuser.double.definition import Definition
from tests.nvfuser.double.operations import Operations
from tests.nvfuser.double.types import check


class FusionDefinition(Definition):
    """`nvfuser.FusionDefinition`."""

    def __init__(self, id: int | None = None, max_length: int = 1024):
        super().__init__()
        self._max_length = max_length
        self.ops = Operations(lambda: self)

    def record(self) -> None:
        super().record()
        check(self.records <= self._max_length, f"more than {self._max_length} operations")

    def __enter__(self) -> "FusionDefinition":
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def execute(
        self,
        inputs: list[Any],
        *,
        device: Any = None,
        override_user_schedule: bool = False,
        capture_debug_output: bool = False,
        profile: bool = False,
    ) -> list[Tensor]:
        return self.run(inputs)
