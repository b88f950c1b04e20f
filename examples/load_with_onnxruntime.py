"""Runs a package of the backend `onnxrt`: ONNX Runtime and numpy are enough.

    python examples/load_with_onnxruntime.py model.dbp inputs.npz results.npz

For packages of static shapes that ONNX Runtime runs whole, saved with row-major arguments. The
manifest says which model of the package that is ("linked"), and what its inputs are called.
"""

import argparse
import hashlib
import json
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnxruntime

CHUNK = 16 << 20  # bytes with a checksum of their own
DTYPES = {"BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "I32": np.int32,
          "I64": np.int64, "F16": np.float16, "F32": np.float32, "F64": np.float64}  # fmt: skip

Arrays = dict[str, np.ndarray]


def load(path: str) -> Callable[[Arrays], list[np.ndarray | None]]:
    """A function from the arguments, by their names, to the results, in order.

    Args:
        path: Of the package.
    """
    with zipfile.ZipFile(path) as file:
        manifest = json.loads(file.read("manifest.json"))
        block, program = only_block(manifest)
        (parts,) = (e["parts"] for e in manifest["executables"] if e["mark"] == block["mark"])
        wiring = json.loads(part(file, manifest, parts["wiring"]))
        model = part(file, manifest, parts["model"])
        weights = tensors(part(file, manifest, "weights.safetensors"))
    stored = [weights[manifest["weights"]["names"][n]] for n, _ in manifest["linked"]["weights"]]
    fixed, inputs = {}, {}
    pairs = zip(block["inputs"], wiring["inputs"], block["reads"], strict=False)
    for (name, _, is_weight), inside, place in pairs:
        if inside is not None and is_weight:
            fixed[inside] = onnxruntime.OrtValue.ortvalue_from_numpy(stored[place])
        elif inside is not None:
            inputs[name] = inside
    options = onnxruntime.SessionOptions()
    options.add_external_initializers(list(fixed), list(fixed.values()))
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(arguments: Arrays) -> list[np.ndarray | None]:
        given = {inside: arguments[name] for name, inside in inputs.items()}
        made = dict(zip(block["writes"], session.run(wiring["outputs"], given), strict=True))
        return [None if isinstance(x, dict) else made[x] for x in program["results"]]

    return run


def only_block(manifest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The one model of a package, and the program around it."""
    if manifest["backend"] != "onnxrt" or manifest["linked"] is None:
        raise ValueError("it is no package of onnxrt, or its sizes vary")
    if manifest["weights"]["checkpoint"] is not None:
        raise ValueError("its weights are in a checkpoint")
    program = manifest["linked"]["program"]
    if len(program["parts"]) != 1:
        raise ValueError("parts of it are run by torch")
    (block,) = program["parts"]
    weights = [is_weight for _, _, is_weight in block["inputs"]]
    others = block["values"][len(weights) :]
    given = [v for v, is_weight in zip(block["values"], weights, strict=False) if not is_weight]
    if not all(is_row_major(value["shape"], value["strides"]) for value in given + others):
        raise ValueError("it was saved with arguments that are not row-major")
    return block, program


def is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie in the order of their indices, without gaps."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def part(file: zipfile.ZipFile, manifest: dict[str, Any], name: str) -> bytes:
    """A part of the file, whose checksums are right."""
    content = file.read(name)
    chunks = [content[at : at + CHUNK] for at in range(0, len(content), CHUNK)]
    if [hashlib.sha256(chunk).hexdigest() for chunk in chunks] != manifest["parts"][name]["sha256"]:
        raise ValueError(f"{name} is not what was saved")
    return content


def tensors(content: bytes) -> Arrays:
    """The tensors of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    arrays = {}
    for name, entry in json.loads(content[8 : 8 + length]).items():
        begin, end = (8 + length + at for at in entry["data_offsets"])
        flat: Any = np.frombuffer(content[begin:end], DTYPES[entry["dtype"]])
        arrays[name] = flat.reshape(entry["shape"])
    return arrays


def main() -> None:
    """Runs a package on arrays of an npz file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("model", "inputs", "results"):
        parser.add_argument(name)
    given = parser.parse_args()
    results = load(given.model)(dict(np.load(given.inputs)))
    arrays: Any = {str(i): r for i, r in enumerate(results) if r is not None}
    np.savez(given.results, **arrays)


if __name__ == "__main__":
    main()
