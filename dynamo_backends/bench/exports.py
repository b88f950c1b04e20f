"""Models exported by hand into a vendor's runtime: what a backend is measured against.

A bare session reads and writes memory that was bound beforehand, so it pays for no conversion.
"""

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dynamo_backends.bench.suites.case import Inputs, call
from dynamo_backends.interface.errors import BackendUnavailableError, OptionError

Bare = Callable[[], list[Tensor]]
"""Runs a model; returns its results, which the next call overwrites."""

_NEEDS = {
    "export:onnxruntime": ("onnxruntime", "pip install 'dynamo-backends[onnx]'"),
    "export:openvino": ("openvino", "pip install 'dynamo-backends[openvino]'"),
}


def is_export(name: str) -> bool:
    """Returns whether a backend is one of these."""
    return name.startswith("export:")


def require(name: str) -> None:
    """Checks that a runtime is installed.

    Raises:
        BackendUnavailableError: It is not.
        OptionError: There is no such export.
    """
    if name not in _NEEDS:
        raise OptionError(f"{name!r} is not one of {', '.join(_NEEDS)}.")
    package, remedy = _NEEDS[name]
    if importlib.util.find_spec(package) is None:
        raise BackendUnavailableError(f"{name} needs {package}; run: {remedy}")


def exported(name: str, model: nn.Module, inputs: Inputs) -> Callable[[], Any]:
    """Returns a call of a model that was exported, with the structure of the model's own results.

    Args:
        name: One of `EXPORTS`.
        model: In eval mode, on the CPU.
        inputs: Inputs of each call.
    """
    with torch.no_grad():
        bare = EXPORTS[name](model, inputs)
        leaves, structure = pytree.tree_flatten(call(model, inputs))

    def run() -> Any:
        found = iter(bare())
        given = [next(found) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return pytree.tree_unflatten(given, structure)

    run.timed = bare  # type: ignore[attr-defined]
    return run


def tensors(tree: Any) -> list[Tensor]:
    """Returns the tensors of nested outputs, in order."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def bare_onnxruntime(model: nn.Module, inputs: Inputs) -> Bare:
    """Returns the model exported by `torch.onnx.export`, in a session of its own."""
    import onnxruntime

    positional, named = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        program = torch.onnx.export(model, positional, kwargs=named, dynamo=True, verbose=False)
        assert program is not None, "given with dynamo=True"
        program.save(file)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        # Threads that spin after a run would slow down whatever is measured next.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    given = [x.contiguous() for x in tensors(inputs)]
    for spot, tensor in zip(session.get_inputs(), given, strict=True):
        binding.bind_ortvalue_input(
            spot.name, onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy())
        )
    results = [torch.empty_like(x).contiguous() for x in tensors(call(model, inputs))]
    for spot, tensor in zip(session.get_outputs(), results, strict=True):
        binding.bind_output(
            spot.name, "cpu", 0, tensor.numpy().dtype, tuple(tensor.shape), tensor.data_ptr()
        )

    def run() -> list[Tensor]:
        session.run_with_iobinding(binding)
        return results

    # What ONNX Runtime reads and writes must live as long as the function.
    run.keeps_alive = (given, results)  # type: ignore[attr-defined]
    return run


def bare_openvino(model: nn.Module, inputs: Inputs) -> Bare:
    """Returns the model converted by `openvino.convert_model`, compiled in float32."""
    from dynamo_backends.openvino.vendor import native, openvino

    converted = openvino.convert_model(model, example_input=inputs)
    given = [x.contiguous() for x in tensors(inputs)]
    converted.reshape({i: list(x.shape) for i, x in enumerate(given)})
    compiled = openvino.Core().compile_model(
        converted,
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": "f32",
            "EXECUTION_MODE_HINT": "ACCURACY",
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "ENABLE_CPU_PINNING": False,
        },
    )
    results = [torch.empty_like(x).contiguous() for x in tensors(call(model, inputs))]
    request = native.CompiledModel.create_infer_request(compiled)
    for i, tensor in enumerate(given):
        request.set_input_tensor(i, openvino.Tensor(tensor.numpy(), shared_memory=True))
    for i, tensor in enumerate(results):
        request.set_output_tensor(i, openvino.Tensor(tensor.numpy(), shared_memory=True))

    def run() -> list[Tensor]:
        request.infer({}, share_outputs=True, decode_strings=False)
        return results

    # What OpenVINO reads and writes must live as long as the function.
    run.keeps_alive = (given, results)  # type: ignore[attr-defined]
    return run


EXPORTS: dict[str, Callable[[nn.Module, Inputs], Bare]] = {
    "export:onnxruntime": bare_onnxruntime,
    "export:openvino": bare_openvino,
}
