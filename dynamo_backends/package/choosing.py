"""Which backend autotune takes for a package."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dynamo_backends.interface.availability import availability_of
from dynamo_backends.interface.compiler import compiler
from dynamo_backends.interface.errors import SaveError
from dynamo_backends.interface.registry import get_backend, is_backend
from dynamo_backends.interface.report import record

SHIPPED = ("openxla", "onnxrt", "ov", "tvm", "iree")
"""Those that compete by default: what they compile can be written to a file."""


def chosen_backend(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The backend that autotune chooses for one call of a model, and the options that it had.

    Args:
        model: What is called.
        args: Arguments.
        kwargs: Keyword arguments.
        options: Of autotune. Without `candidates`, those compete whose executables can be saved.

    Raises:
        SaveError: The model is several graphs, for which autotune may choose differently.
    """
    given = {**options, "mode": "wait"}  # the one call decides
    if not given.get("candidates"):
        given["candidates"] = tuple(n for n in SHIPPED if availability_of(get_backend(n)).usable)
    tuned = torch.compile(model, backend=compiler("autotune", **given), dynamic=False)
    with record() as reports, torch.no_grad():
        tuned(*args, **kwargs)
    names = [report.chosen for report in reports if report.chosen]
    if len(names) != 1:
        raise SaveError(
            f"autotune chose {len(names)} times, and a package has one graph: the model breaks "
            "into several, or none was captured. Name a backend."
        )
    (name,) = names
    if name != "eager" and not is_backend(name):
        raise SaveError(
            f"autotune chose {name!r}, which is no backend of this package; "
            "leave it out of `candidates`."
        )
    parsed = get_backend("autotune").Options
    common = {key: value for key, value in options.items() if key in _common(parsed)}
    return name, common if name != "eager" else {}


def _common(autotunes: Any) -> set[str]:
    """Options that every backend has."""
    from dynamo_backends.interface.options import Options

    return set(Options.__dataclass_fields__) & set(autotunes.__dataclass_fields__)
