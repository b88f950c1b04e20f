"""Models of a checkout of TorchBench (https://github.com/pytorch/benchmark).

Its models load their own requirements and may download weights or data: install them as its README
says.
"""

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

from dynamo_backends.bench.suites.case import Inputs, ModelCase
from dynamo_backends.interface.errors import ModelError

_CLONE = "git clone https://github.com/pytorch/benchmark CHECKOUT"


def torchbench(path: str, batch: int | None = None) -> list[ModelCase]:
    """Returns the suite: every model of the checkout, in TorchBench's eval mode.

    Args:
        path: The checkout.
        batch: Examples per call; None: as many as TorchBench takes.

    Raises:
        ModelError: There is no checkout.
    """
    folder = Path(path) / "torchbenchmark" / "models"
    if not path or not folder.is_dir():
        where = f"{path!r} is not a TorchBench checkout" if path else "--path is missing"
        raise ModelError(f"{where}. Run `{_CLONE}` and name it by --path CHECKOUT.")
    names = sorted(p.parent.name for p in folder.glob("*/__init__.py"))
    return [_case(str(Path(path).resolve()), name, batch) for name in names]


def _case(path: str, name: str, batch: int | None) -> ModelCase:
    @functools.cache
    def made() -> tuple[Any, Any]:
        if path not in sys.path:
            sys.path.insert(0, path)
        kind = importlib.import_module(f"torchbenchmark.models.{name}").Model
        found: tuple[Any, Any] = kind(test="eval", device="cpu", batch_size=batch).get_module()
        return found

    def example() -> Inputs:
        inputs = made()[1]
        return inputs if isinstance(inputs, dict) else tuple(inputs)

    return ModelCase(name, lambda: made()[0], example, enliven=False)
