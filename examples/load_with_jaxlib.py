"""Runs a ".stablehlo" file of `dynamo_backends.export`: jaxlib and numpy are enough.

    python examples/load_with_jaxlib.py model.stablehlo inputs.npz results.npz

The file is a zip: `manifest.json` names inputs and results, `weights.safetensors` has the weights,
and `cpu.mlir` is the program, StableHLO that later versions of XLA read. It takes the weights, then
the inputs. `cuda.mlir` and `tpu.mlir` are the same for those, where a PJRT plugin compiles them.
"""

import argparse
import hashlib
import json
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxlib import _jax
from jaxlib import xla_client as xla

CHUNK = 16 << 20  # bytes with a checksum of their own
DTYPES = {"BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "I32": np.int32,
          "I64": np.int64, "F16": np.float16, "F32": np.float32, "F64": np.float64}  # fmt: skip

Arrays = dict[str, np.ndarray]


def load(path: str) -> Callable[[Arrays], Arrays]:
    """A function from the inputs to the results, by their names.

    Args:
        path: Of the file.
    """
    with zipfile.ZipFile(path) as file:
        manifest = json.loads(file.read("manifest.json"))
        program = part(file, manifest, "cpu.mlir")
        weights = tensors(part(file, manifest, "weights.safetensors"))
    client: Any = xla.make_cpu_client()
    (device,) = client.local_devices()
    loaded = client.compile_and_load(program, xla.DeviceList((device,)), xla.CompileOptions())
    fixed = [on_device(weights[name], device) for name in manifest["weights"]]

    def run(inputs: Arrays) -> Arrays:
        given = [on_device(fitting(inputs, known), device) for known in manifest["inputs"]]
        results = loaded.execute_sharded([*fixed, *given]).disassemble_into_single_device_arrays()
        names = [known["name"] for known in manifest["outputs"]]
        return {name: on_host(shards[0]) for name, shards in zip(names, results, strict=True)}

    return run


def part(file: zipfile.ZipFile, manifest: dict[str, Any], name: str) -> bytes:
    """A part of the file, whose checksums are right."""
    content = file.read(name)
    chunks = [content[at : at + CHUNK] for at in range(0, len(content), CHUNK)]
    if [hashlib.sha256(chunk).hexdigest() for chunk in chunks] != manifest["parts"][name]["sha256"]:
        raise ValueError(f"{name} is not what was written")
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


def fitting(inputs: Arrays, known: dict[str, Any]) -> np.ndarray:
    """An input of the dtype and shape that the program is for."""
    array = inputs[known["name"]]
    if (str(array.dtype), list(array.shape)) != (known["dtype"], known["shape"]):
        raise ValueError(f"{known['name']} is {array.dtype}{list(array.shape)}, not {known}")
    return array


def on_device(array: np.ndarray, device: Any) -> Any:
    """An array as XLA has it, in memory of its own."""
    return _jax.dlpack_managed_tensor_to_buffer(array.copy(order="C").__dlpack__(), device, None)


def on_host(buffer: Any) -> np.ndarray:
    """An array of XLA's as numpy has it."""
    return np.from_dlpack(Capsule(_jax.buffer_to_dlpack_managed_tensor(buffer))).copy()


class Capsule:
    """What numpy takes of others (https://dmlc.github.io/dlpack/latest/python_spec.html)."""

    def __init__(self, capsule: Any):
        self.capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        """The array."""
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        """A CPU."""
        return 1, 0


def main() -> None:
    """Runs a file on arrays of an npz file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("model", "inputs", "results"):
        parser.add_argument(name)
    given = parser.parse_args()
    results: Any = load(given.model)(dict(np.load(given.inputs)))
    np.savez(given.results, **results)


if __name__ == "__main__":
    main()
