"""`nvfuser_direct`: operations are functions of a module, on the open definition."""

from typing import Any

from torch import Tensor

from tests.nvfuser.double.definition import Definition
from tests.nvfuser.double.operations import Operations
from tests.nvfuser.double.types import FusionError, check

_guards: list["FusionDefinition"] = []


def _current() -> "FusionDefinition":
    if not _guards:
        raise FusionError("no definition is open")
    return _guards[-1]


_ops = Operations(_current)


class FusionDefinition(Definition):
    """`nvfuser_direct.FusionDefinition`."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = _ops

    def __enter__(self) -> "FusionDefinition":
        self.open()
        check(not _guards, "two definitions are open at once")
        _guards.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _guards.remove(self)
        self.close()

    def execute(
        self, inputs: list[Any], *, device: Any = None, auto_schedule: bool = True
    ) -> list[Tensor]:
        return self.run(inputs)
