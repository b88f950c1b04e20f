"""Collects every private jaxlib API that this package uses.

Checked with jaxlib 0.10.2 and 0.12.0.1 (the whole suite, on CPUs) and 0.11.2 (tests/cuda and
tests/test_semantics.py, on a GPU). jaxlib promises nothing for these names; when a new version is
admitted in pyproject.toml, run `make test` with it and add it here.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller
from typing import Any

import dynamo_backends.xla.jax_import  # noqa: F401 - before jax

# isort: split
import jax
import jaxlib.version
import numpy as np
from jax._src import hardware_utils
from jax._src.interpreters import mlir
from jax._src.lib import _jax
from jax._src.lib import xla_client as xc
from jax.core import ShapedArray
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
from jaxlib.mlir.passmanager import PassManager
from torch import Tensor

from dynamo_backends._torch_private import to_dlpack
from dynamo_backends.runtime.cpu_info import use_batch_scheduling


def make_cpu_client(asynchronous: bool = False, devices: int | None = None) -> Any:
    """Returns a PJRT client on the CPU, by default a synchronous one, separate from jax's own.

    A synchronous client runs a program in the calling thread if all arguments are ready, so that
    its results are ready, too. `import_tensor` and `copy_to_device` return buffers that are.

    Args:
        asynchronous: Whether programs run while their caller goes on.
        devices: Into how many devices the CPU is divided; None: what `XLA_FLAGS` says, else one.
    """
    return xc.make_cpu_client(asynchronous=asynchronous, num_devices=devices)


def start_coordination_service(address: str, size: int) -> Any:
    """Starts jaxlib's coordination service (a key-value store) for multi-process jobs.

    Args:
        address: Where, such as "127.0.0.1:2345".
        size: How many processes there are.
    """
    return _jax.get_distributed_runtime_service(address, size, heartbeat_timeout=_NEVER)


def make_distributed_cpu_client(
    address: str, rank: int, size: int, host: str, seconds: int
) -> tuple[Any, Any]:
    """Creates a multi-process CPU PJRT client that runs collectives through gloo.

    Args:
        address: Address of `start_coordination_service`.
        rank: This process.
        size: How many there are.
        host: The name or address under which the others reach this process.
        seconds: How long to wait for the others.

    Returns:
        The client, and what is connected to the service: while it is, an error of the service
        ends the process. `shutdown()` ends that; afterwards there are no groups of processes but
        those that have met.
    """
    service = _jax.get_distributed_runtime_client(
        address,
        rank,
        init_timeout=seconds,
        heartbeat_timeout=_NEVER,
        shutdown_timeout=seconds,
        shutdown_on_destruction=False,
    )
    service.connect()
    with use_batch_scheduling():
        gloo = _jax.make_gloo_tcp_collectives(distributed_client=service, hostname=host)
    client = xc.make_cpu_client(
        asynchronous=True,
        distributed_client=service,
        node_id=rank,
        num_nodes=size,
        collectives=gloo,
        num_devices=1,
    )
    return client, service


_NEVER = 10_000_000  # seconds without a heartbeat; who lives `runtime.ranks` finds out


def tpu_chips() -> int:
    """Returns how many TPU chips this machine has; no client is started."""
    return hardware_utils.num_available_tpu_chips_and_device_id()[0]


def compile_program(
    client: Any,
    device: Any,
    module: bytes,
    runs_once: bool = False,
    sparing: bool = False,
    fuses_products: bool = False,
) -> Any:
    """Compiles StableHLO bytecode for one device.

    Args:
        client: The device's PJRT client.
        device: Where it is to run.
        module: The bytecode.
        runs_once: With little effort, for it is to run but once.
        sparing: On a CPU, in the order that needs the least memory. XLA itself first runs all
            that waits for nothing, so that operations without work for all cores run beside each
            other; it prepares all weights at the start then, even for the end of a step.
        fuses_products: On a CPU, whether YNNPACK may compute products together with what is before
            and after them, which is not right for all (see `repeated.may_fuse_products`).
    """
    options = _compile_options(device)
    flags: list[_Flag] = [("xla_backend_optimization_level", 0)] if runs_once else []
    flags += _disabled_passes(device.platform)
    if device.platform == "cpu":
        flags += _cpu_flags(sparing, fuses_products)
    return _compile(client, (device,), module, options, flags)


_Flag = tuple[str, Any]
_PRODUCTS_ALONE: _Flag = (
    "xla_cpu_experimental_ynn_fusion_type",
    "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
)

# XLA's algebraic simplifier computes (x + c) - c as x, log(exp(x)) as x and x * 1e30 * 1e30 as
# x * inf: what it takes for equal is not in floating point.
_SIMPLIFIER = "algsimp"

# XLA may leave out the rounding of float32 to a shorter type and back.
_CASTS_ROUND: _Flag = ("xla_allow_excess_precision", False)

CPU_DISABLED_PASSES: tuple[str, ...] = (_SIMPLIFIER,)
"""Passes of XLA that programs for CPUs are compiled without. On other platforms the lowering
protects what the simplifier would rewrite (`lowering.barriers`)."""


def _cpu_flags(sparing: bool, fuses_products: bool) -> list[_Flag]:
    order = ("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED")
    return [order] * sparing + [_PRODUCTS_ALONE] * (not fuses_products)


def runs_algebraic_simplifier(platform: str) -> bool:
    """Returns whether XLA's algsimp pass runs when compiling for this platform."""
    return platform != "cpu" or _SIMPLIFIER not in CPU_DISABLED_PASSES


def _disabled_passes(platform: str, more: Sequence[str] = ()) -> list[_Flag]:
    passes = (*(CPU_DISABLED_PASSES if platform == "cpu" else ()), *more)
    return [("xla_disable_hlo_passes", ",".join(passes))] if passes else []


def _compile(
    client: Any, devices: Sequence[Any], module: bytes, options: Any, flags: Sequence[_Flag]
) -> Any:
    options.env_option_overrides = [*flags, _CASTS_ROUND]
    try:
        return client.compile_and_load(module, _jax.DeviceList(tuple(devices)), options)
    except jax.errors.JaxRuntimeError as error:
        if _PRODUCTS_ALONE not in flags or f"option: '{_PRODUCTS_ALONE[0]}'" not in str(error):
            raise
    # The flag is an experimental one, which not all versions have.
    others = [flag for flag in flags if flag != _PRODUCTS_ALONE]
    return _compile(client, devices, module, options, others)


def serialize(client: Any, executable: Any) -> bytes:
    """The machine code of an executable, for `deserialize` in a process of the same machine."""
    serialize_executable = getattr(client, "serialize_executable", None)
    return serialize_executable(executable) if serialize_executable else executable.serialize()


def deserialize(client: Any, device: Any, code: bytes) -> Any:
    """Loads what `serialize` made; raises on damaged code."""
    devices = _jax.DeviceList((device,))
    return client.deserialize_executable(code, devices, _compile_options(device))


def _compile_options(device: Any) -> Any:
    options = xc.CompileOptions()
    options.num_replicas = 1
    options.num_partitions = 1
    options.device_assignment = xc.DeviceAssignment.create(np.array([[device.id]], dtype=np.int32))
    return options


def bytecode(lowered: "jax.stages.Lowered") -> bytes:
    """Serializes the StableHLO module of a lowered function to MLIR bytecode."""
    return mlir.module_to_bytecode(_canonical_module(lowered))


def _canonical_module(lowered: "jax.stages.Lowered") -> Any:
    """The StableHLO of a lowered function, in which no broadcast repeats a dimension of size 1.

    XLA makes a broadcast to the same shape of each of those, and its algebraic simplifier removes
    it. On CPUs, where programs are compiled without that pass, YNNPACK takes the dimensions of
    size 1 in such a result for repeated ones: `(x + row).sum(1)` leaves out the row, or the process
    ends by SIGSEGV. A reshape that removes these dimensions means the same.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    broadcasts: list[Any] = []

    def collect(operation: Any) -> Any:
        if operation.name == "stablehlo.broadcast_in_dim":
            broadcasts.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(collect)
    with module.context:
        for operation in broadcasts:
            _remove_unit_dimensions(operation)
    return module


def _remove_unit_dimensions(broadcast: Any) -> None:
    (operand,), (result,) = broadcast.operands, broadcast.results
    source, target = operand.type, result.type
    places = list(broadcast.attributes["broadcast_dimensions"])
    kept = [i for i, place in enumerate(places) if source.shape[i] == target.shape[place]]
    if len(kept) == len(places):
        return
    shape = [source.shape[i] for i in kept]
    with ir.InsertionPoint(broadcast), broadcast.location:
        kind = ir.RankedTensorType.get(shape, source.element_type)
        broadcast.operands[0] = stablehlo.reshape(kind, operand)
        dims = ir.DenseI64ArrayAttr.get([places[i] for i in kept])
        broadcast.attributes["broadcast_dimensions"] = dims


def to_portable_artifact(lowered: "jax.stages.Lowered") -> bytes:
    """Serializes a lowered function to a versioned StableHLO portable artifact."""
    weeks = stablehlo.StablehloCompatibilityRequirement.WEEK_12
    version = stablehlo.get_version_from_compatibility_requirement(weeks)
    module = _canonical_module(lowered)
    with module.context:  # where the lines of programs are is nobody's concern
        PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
    return _jax.mlir.serialize_portable_artifact(mlir.module_to_bytecode(module), version)


def make_single_device_call(executable: Any, device: Any) -> Callable[[list[Any]], list[Any]]:
    """Returns a function that runs an executable on one device, buffers to buffers."""
    handlers: list[Any] = []
    execute = executable.execute_sharded

    def call(buffers: list[Any]) -> list[Any]:
        results = execute(buffers)
        if handlers:
            return results.consume_with_handlers(handlers)
        outputs = [shards[0] for shards in results.disassemble_into_single_device_arrays()]
        handlers[:] = [_handler(output, device) for output in outputs]
        return outputs

    return call


def _handler(output: Any, device: Any) -> Any:
    """Returns what makes a buffer like `output` of a result."""
    return _result_handler(output.aval, xc.SingleDeviceSharding(device))


def _result_handler(aval: Any, sharding: Any) -> Any:
    """Returns the function that makes an array of a result, for any version of jaxlib."""
    checks = {} if jaxlib.version.__version_info__ >= (0, 11) else {"_skip_checks": True}
    return xc.array_result_handler(aval, sharding, committed=True, **checks)


def make_lazy_device_call(
    executable: Any, device: Any, outputs: Sequence[jax.ShapeDtypeStruct]
) -> Callable[[list[Any]], Iterator[list[Any]]]:
    """Returns a function of buffers to an iterator that runs when it is advanced, in C.

    Args:
        executable: What to execute.
        device: Where.
        outputs: Shape and dtype of each.

    Returns:
        A function from a list of buffers to an iterator, which executes when its only element, the
        list of the outputs' buffers, is taken.
    """
    avals = [ShapedArray(x.shape, x.dtype) for x in outputs]
    sharding = xc.SingleDeviceSharding(device)
    handlers = [_result_handler(aval, sharding) for aval in avals]
    consume = methodcaller("consume_with_handlers", handlers)
    execute = executable.execute_sharded
    return lambda buffers: map(consume, map(execute, (buffers,)))


def temporary_bytes(executable: Any) -> int:
    """Returns the bytes of temporary memory that one execution needs."""
    return executable.get_compiled_memory_stats().temp_size_in_bytes


import_dlpack: Callable[..., Any] = _jax.dlpack_managed_tensor_to_buffer
export_dlpack: Callable[..., Any] = _jax.buffer_to_dlpack_managed_tensor


def import_tensor(tensor: Tensor, device: Any) -> Any:
    """Imports a row-major tensor on the CPU as a buffer that is ready.

    The buffer shares the tensor's memory if XLA can compute there. Otherwise XLA copies it, in a
    thread that needs the GIL to release the tensor. A program that is launched before the copy is
    done runs in such a thread, too, and a caller that waits for its results with the GIL held
    (`unsafe_buffer_pointer` does) never returns.

    Args:
        tensor: What to import; torch keeps its memory until the buffer is deleted.
        device: Device of a CPU client.
    """
    buffer = import_dlpack(to_dlpack(tensor), device, None)
    if not buffer.is_ready():
        buffer.block_until_ready()
    return buffer


def copy_to_device(device: Any, array: np.ndarray) -> Any:
    """Copies a numpy array into a new device buffer that XLA owns and may donate.

    The array is not read after the call. On a CPU the copy is ready.
    """
    return xc.batched_device_put(
        ShapedArray(array.shape, array.dtype),
        xc.SingleDeviceSharding(device),
        [array],
        [device],
        committed=True,
        force_copy=True,
        host_buffer_semantics=xc.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL,
        enable_x64=True,
    )


# --- programs that are split over several devices


def compile_spmd_program(
    client: Any,
    devices: Sequence[Any],
    module: bytes,
    reduces_apart: bool = False,
    fuses_products: bool = False,
) -> Any:
    """Compiles StableHLO with shardings to one SPMD executable for several devices.

    XLA splits it by its own partitioner (shardy). On CPUs its operations run in the order that
    needs the least memory. Where a device waits for others for 40 seconds XLA ends the process;
    the options that it has for that change nothing.

    Args:
        client: The devices' PJRT client.
        devices: In the order of the mesh.
        module: The bytecode.
        reduces_apart: On CPUs, whether each all-reduce runs when its operand is there. By default
            XLA makes one of all that do not depend on each other, which needs all operands and all
            results at once.
        fuses_products: See `compile_program`.
    """
    options = xc.CompileOptions()
    options.num_replicas = 1
    options.num_partitions = len(devices)
    ids = np.array([[device.id for device in devices]], dtype=np.int32)
    options.device_assignment = xc.DeviceAssignment.create(ids)
    options.executable_build_options.use_spmd_partitioning = True
    options.executable_build_options.use_shardy_partitioner = True
    is_cpu = devices[0].platform == "cpu"
    more = ["cpu-all-reduce-combiner"] * (is_cpu and reduces_apart)
    flags = _disabled_passes(devices[0].platform, more)
    if is_cpu:
        flags += _cpu_flags(True, fuses_products)
    return _compile(client, devices, module, options, flags)


def make_multi_device_call(
    executable: Any, outputs: Sequence[jax.ShapeDtypeStruct], shardings: Sequence[Any]
) -> Callable[[list[Any]], list[Any]]:
    """Returns a function that runs an SPMD executable, sharded arrays to sharded arrays.

    Args:
        executable: What to execute.
        outputs: Shape and dtype of each.
        shardings: Shardings of each.
    """
    handlers = [
        _result_handler(ShapedArray(x.shape, x.dtype), sharding)
        for x, sharding in zip(outputs, shardings, strict=True)
    ]
    execute = executable.execute_sharded
    return lambda arrays: execute(arrays).consume_with_handlers(handlers)


def make_multi_process_call(executable: Any) -> Callable[[list[Any]], list[Any]]:
    """Returns a function that runs on all processes and returns this one's shards."""
    execute = executable.execute_sharded

    def call(arrays: list[Any]) -> list[Any]:
        shards = execute(arrays).disassemble_into_single_device_arrays()
        return [each[0] for each in shards]

    return call


def program_text(executable: Any) -> str:
    """Returns the optimized HLO of an executable as text."""
    text: str = executable.hlo_modules()[0].to_string()
    return text


def compiled_memory_stats(executable: Any) -> Any:
    """Returns XLA's compiled memory statistics of an executable, per device."""
    return executable.get_compiled_memory_stats()


def shard_array(array: np.ndarray, sharding: Any) -> Any:
    """Copies a numpy array to the devices of a sharding, each device getting its shard.

    Of devices of several processes each process fills its own.
    """
    places = sharding.addressable_devices_indices_map(array.shape)
    parts = [
        copy_to_device(device, np.asarray(array[i], order="C")) for device, i in places.items()
    ]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def make_array_from_shard(part: np.ndarray, shape: Sequence[int], sharding: Any) -> Any:
    """Creates a global array of which this process provides its one local shard.

    Args:
        part: This process's.
        shape: Shape of the whole.
        sharding: Sharding of the whole.
    """
    (device,) = sharding.addressable_devices
    parts = [copy_to_device(device, np.asarray(part, order="C"))]
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, parts)


def leak_object(owned: Any) -> None:
    """Leaks a reference on purpose: destroying a PJRT client could wait forever."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owned))
