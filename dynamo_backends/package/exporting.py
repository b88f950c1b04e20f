"""`export`: a model as a file that other runtimes read, ONNX or StableHLO."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends.interface.errors import SaveError
from dynamo_backends.interface.registry import get_backend, require_available
from dynamo_backends.package import archive
from dynamo_backends.package import weights as stored
from dynamo_backends.package.capturing import Captured, captured, example_calls, in_torchs_order
from dynamo_backends.package.inputs import Arguments
from dynamo_backends.package.spec import Spec
from dynamo_backends.package.whole import Whole, whole
from dynamo_backends.verify.comparator import describe_difference
from dynamo_backends.verify.reference import module_in_float64, widen_to_float64

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]

WEIGHTS = "weights.safetensors"


def write_onnx(path: str | os.PathLike[str], whole: Whole) -> Run:
    """Writes an ONNX model with its weights; returns a function that runs it here.

    Args:
        path: Path of the file.
        whole: The model, compiled by `onnxrt`.
    """
    from dynamo_backends.package.onnx_file import run_file, write_model

    used = write_model(path, whole)
    return lambda given: run_file(path, {whole.input_names[at]: given[at] for at in used})


def write_stablehlo(
    path: str | os.PathLike[str], whole: Whole, platforms: Sequence[str], options: Any
) -> Run | None:
    """Writes StableHLO programs and weights; returns a function that runs the CPU one.

    Args:
        path: Path of the file, a zip like a package.
        whole: The model.
        platforms: See `export`.
        options: Options of `openxla`.
    """
    from dynamo_backends.xla.exporting import portable_program, run_stablehlo_on_cpu
    from dynamo_backends.xla.options import lowering_options

    graph, weights = whole.graph, list(whole.weights.values())
    programs = {p: portable_program(graph, lowering_options(p, options)) for p in platforms}
    content, names = stored.dumped({f"weight_{i}": t for i, t in enumerate(weights)})
    values = [graph.placeholders[i].meta["val"] for i in graph.activations]
    outputs = [node.meta["val"] for node in graph.outputs]
    manifest = {
        "weights": [names[f"weight_{i}"] for i in range(len(weights))],
        "inputs": _described(whole.input_names, values),
        "outputs": _described(whole.output_names, outputs),
        "platforms": list(platforms),
        "torch": torch.__version__,
    }
    files = {f"{platform}.mlir": program for platform, program in programs.items()}
    archive.write(path, manifest, {WEIGHTS: content, **files})
    if "cpu" not in programs:
        return None
    return lambda given: run_stablehlo_on_cpu(programs["cpu"], [*weights, *given])


def _described(names: Sequence[str], values: Sequence[Tensor]) -> list[dict[str, Any]]:
    pairs = zip(names, map(Spec.of, values), strict=True)
    return [{"name": name, "dtype": spec.to_dict()["dtype"], "shape": list(spec.shape)}
            for name, spec in pairs]  # fmt: skip


PLATFORMS = ("cpu", "cuda", "tpu")
_BACKENDS = {".onnx": "onnxrt", ".stablehlo": "openxla"}


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
    platforms: Sequence[str] = PLATFORMS,
) -> None:
    """Writes a model for other runtimes: ONNX (".onnx") or StableHLO (".stablehlo").

    The file is run here, at the example's sizes and a few others, and compared with eager.

    Examples:
        >>> batch = torch.export.Dim("batch", min=2, max=64)
        >>> dynamo_backends.export(model, "model.onnx", (x,), dynamic_shapes={"x": {0: batch}})
        >>> dynamo_backends.export(model, "model.stablehlo", (x,))

    Args:
        model: For inference; it is exported with `torch.export.export`, as it is.
        path: Of the file; it is replaced if it exists. Its suffix says which form is written. An
            ONNX model with more than 1 GiB of weights has these in `<path>.data`.
        args: Arguments of one call.
        kwargs: Keyword arguments of it.
        dynamic_shapes: As for `torch.export.export`; of ONNX alone.
        options: Options of the backend that lowers the model, `onnxrt` or `openxla`.
        platforms: Platforms of the StableHLO file: "cpu", "cuda", "tpu". They need not be here.

    Raises:
        SaveError: The model is not one graph for all sizes, or its results differ from eager's.
        FallbackRefusedError: The format cannot express an operator.
        BackendUnavailableError: The backend that lowers the model is not installed.
    """
    model, path = in_torchs_order(model, path, "export")
    path = os.path.expanduser(path)
    name = _BACKENDS.get(Path(path).suffix)
    if name is None:
        raise SaveError(
            f"export writes {' and '.join(_BACKENDS)} files, not {Path(path).name}. Choose one of "
            "these file extensions."
        )
    if not Path(path).parent.is_dir():
        raise SaveError(f"there is no folder {Path(path).parent} to write {Path(path).name} in.")
    if name == "openxla":
        _check_asked(dynamic_shapes, platforms)
    inner = get_backend(name)
    require_available(inner)
    given = {**(options or {}), "fallback": "error"}
    call = (tuple(args), dict(kwargs or {}))
    found = captured(model, call, dynamic_shapes, name, inner, given)
    made = whole(found, inner)
    run = (
        write_onnx(path, made)
        if name == "onnxrt"
        else write_stablehlo(path, made, platforms, found.contents.parsed(inner))
    )
    wrong = None if run is None else _difference(found, made, run)
    if wrong is not None:
        Path(path).unlink()
        raise SaveError(
            f"the exported file computes other results than eager and was deleted: {wrong}"
        )


def _check_asked(dynamic_shapes: Any, platforms: Sequence[str]) -> None:
    if dynamic_shapes is not None:
        raise SaveError("StableHLO export supports static sizes only. Remove dynamic_shapes.")
    unknown = [p for p in platforms if p not in PLATFORMS]
    if unknown or not platforms:
        raise SaveError(
            f"platforms must be chosen from {', '.join(PLATFORMS)}, not {list(platforms)}."
        )


def _difference(found: Captured, made: Whole, run: Run) -> str | None:
    """Returns how results of the file differ from eager's, in words; None if they do not."""
    contents, portable = found.contents, found.portable
    bound = Arguments(contents.names, contents.arguments, portable.leaves, portable.given)
    precise = module_in_float64(portable.module)
    with torch.no_grad():
        for args, kwargs in example_calls(found, None):
            values = [*found.values, *bound(args, kwargs)]
            results = run(made.activations(values))
            wide = _there(precise(*map(widen_to_float64, values)))
            wrong = describe_difference(_there(portable.in_eager(list(values))), results, wide)
            if wrong is not None:
                return wrong
    return None


def _there(results: Sequence[Any]) -> list[Any]:
    return [x for x in results if x is not None]
