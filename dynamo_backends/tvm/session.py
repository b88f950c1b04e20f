"""TVM's compiler and virtual machine: targets, threads, executables in memory and on disk."""

import functools
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.interface.logs import filter_stderr
from dynamo_backends.tvm.vendor import relax, tvm

# Of TVM's compiler, such as "[14:34:58] /project/src/tirx/op/op.cc:275: Warning: Detected ...".
CHATTER = re.compile(rb"^\[\d\d:\d\d:\d\d\] \S+\.(cc|h):\d+: Warning: ")


@dataclass(frozen=True)
class Settings:
    """The settings with which graphs are compiled.

    Attributes:
        num_threads: 0: as many as torch has.
        tune_trials: Schedules that are measured for a graph; 0: nothing is tuned.
        tune_budget_s: Seconds that this process may spend on tuning.
        uses_records: Whether schedules that tuning has found are used.
    """

    num_threads: int = 0
    tune_trials: int = 0
    tune_budget_s: float = 300
    uses_records: bool = True

    @property
    def threads(self) -> int:
        """Returns how many threads a graph has."""
        return self.num_threads or torch.get_num_threads()


@functools.cache
def describe_host() -> str:
    """Returns the processor that code is compiled for."""
    codegen = tvm.target.codegen
    return f"{codegen.llvm_get_system_triple()} {codegen.llvm_get_system_cpu()}"


@functools.cache
def target(threads: int) -> Any:
    """Returns the processor of this machine, as TVM's target."""
    cpu = tvm.target.codegen.llvm_get_system_cpu()
    return tvm.target.Target({"kind": "llvm", "mcpu": cpu, "num-cores": threads})


@functools.cache
def vector_lanes() -> int:
    """float32 numbers in one of this processor's vectors."""
    bits = int(tvm.target.codegen.llvm_get_vector_width(target(1)))
    return max(bits, 128) // 32


# Read when a pool starts. A pool that spins takes the processor from torch after each call, and one
# whose threads are bound to processors puts the calling thread, too, on all of them.
_POOL = {"TVM_BIND_THREADS": "0", "TVM_THREAD_POOL_SPIN_COUNT": "0"}

_environment = fork_safe_lock()
_pool = threading.local()


def use_threads(count: int) -> None:
    """Gives the calling thread's pool (TVM has one per thread) that many threads."""
    if getattr(_pool, "threads", None) == count:
        return
    largest = max(count, getattr(_pool, "threads", count))
    with _environment, _variables({**_POOL, "TVM_NUM_THREADS": str(largest)}):
        _configure()(1, count)
    _pool.threads = count


@functools.cache
def _configure() -> Callable[[int, int], None]:
    configure: Callable[[int, int], None] = tvm.get_global_func("runtime.config_threadpool")
    return configure


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Machine:
    """TVM's virtual machine with a loaded program; it runs one call at a time.

    Args:
        module: TVM's runtime module of an executable.
        is_ranged: The sizes of its tensors vary. TVM's pool keeps the memory of each size for good.
    """

    def __init__(self, module: Any, is_ranged: bool):
        machine = relax.VirtualMachine(module, tvm.cpu(), "naive" if is_ranged else "pooled")
        self.main: Callable[..., Sequence[torch.Tensor]] = machine["main"]
        self._machine = machine

    def prepare(self, weights: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Returns what the program makes of weights before the first call."""
        prepared: Sequence[Any] = self._machine["main_transform_params"](tuple(weights))
        return prepared


def return_pooled_memory() -> None:
    """Gives back what the pool of all machines keeps for their next calls."""
    tvm.get_global_func("vm.builtin.memory_manager.clear")()


_CODE, _PROGRAM = "code", "program"


def dump(module: Any) -> dict[str, bytes]:
    """Returns an executable as bytes: optimised LLVM bitcode, and the virtual machine's program."""
    with tempfile.TemporaryDirectory() as folder, filter_stderr(CHATTER):
        parts = {}
        for kind, imported in enumerate(module.imports):
            path = Path(folder) / f"{kind}.ll"
            imported.write_to_file(str(path), "bc")
            parts[f"{_CODE}{kind}"] = path.read_bytes()
        path = Path(folder) / "program.ro"
        module.write_to_file(str(path), "ro")
        return {**parts, _PROGRAM: path.read_bytes()}


def load(parts: dict[str, bytes]) -> Any:
    """Recreates an executable from `dump`; raises on damaged bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.ro"
        path.write_bytes(parts[_PROGRAM])
        module = tvm.get_global_func("relax.ExecutableLoadFromFile")(str(path))
        for name in sorted(name for name in parts if name.startswith(_CODE)):
            path = Path(folder) / f"{name}.ll"
            path.write_bytes(parts[name])
            module.import_module(tvm.runtime.load_module(str(path)))
        return module
