"""Files of other runtimes: what is in them, and a run of them here."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.package import archive
from dynamo_backends.package import weights as stored
from dynamo_backends.package.spec import Spec
from dynamo_backends.package.whole import Whole

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]

WEIGHTS = "weights.safetensors"


def written_onnx(path: str | os.PathLike[str], whole: Whole) -> Run:
    """Writes an ONNX model with its weights; how it is run here.

    Args:
        path: Of the file.
        whole: The model, compiled by `onnxrt`.
    """
    from dynamo_backends.package.onnx_file import run_file, write_model

    used = write_model(path, whole)
    return lambda given: run_file(path, {whole.input_names[at]: given[at] for at in used})


def written_stablehlo(
    path: str | os.PathLike[str], whole: Whole, platforms: Sequence[str], options: Any
) -> Run | None:
    """Writes programs for platforms, and weights; how that for CPUs is run here.

    Args:
        path: Of the file, a zip like a package.
        whole: The model.
        platforms: See `export`.
        options: Of `openxla`.
    """
    from dynamo_backends.xla.exporting import portable_program, run_here
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
    return lambda given: run_here(programs["cpu"], [*weights, *given])


def _described(names: Sequence[str], values: Sequence[Tensor]) -> list[dict[str, Any]]:
    pairs = zip(names, map(Spec.of, values), strict=True)
    return [{"name": name, "dtype": spec.to_dict()["dtype"], "shape": list(spec.shape)}
            for name, spec in pairs]  # fmt: skip
