"""Compiles programs with `iree-compile` in a process of its own; all of IREE's undocumented names.

The compiler can be ended by its own mistakes; in this process it would take the user's program with
it.
"""

import functools
import re
import signal
import subprocess
from dataclasses import dataclass
from typing import Any

from dynamo_backends.interface.errors import CompileError

STACK_BYTES = 1 << 20
"""What a kernel may take of its thread's stack. IREE's own limit refuses some of its tilings."""

_BASE = (
    "--iree-input-type=torch",
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
    "--iree-llvmcpu-debug-symbols=false",
    f"--iree-llvmcpu-stack-allocation-limit={STACK_BYTES}",
    "--iree-vm-bytecode-module-strip-source-map=true",
    "--iree-input-demote-f64-to-f32=false",
    "--iree-torch-emit-async-entry-points=false",
)


class CompilerCrashError(CompileError):
    """Raised when `iree-compile` crashes instead of reporting an error."""


@dataclass(frozen=True)
class Settings:
    """The settings with which programs are compiled.

    Attributes:
        level: "O0" to "O3".
        data_tiling: Whether operands of matrix products and convolutions are packed into tiles.
        flags: Further flags of `iree-compile`; the last of several equal ones counts.
        seconds: After which the compiler is stopped.
    """

    level: str = "O3"
    data_tiling: bool = True
    flags: tuple[str, ...] = ()
    seconds: float = 1800.0

    def arguments(self) -> list[str]:
        """Returns these settings as flags of `iree-compile`."""
        tiling = f"--iree-opt-data-tiling={str(self.data_tiling).lower()}"
        return [*_BASE, f"--iree-opt-level={self.level}", tiling, *self.flags]


@functools.lru_cache(maxsize=8)  # a graph of one call has been compiled for its trial
def compile_program(module: bytes, settings: Settings) -> bytes:
    """IREE's bytecode of an MLIR module, with machine code for this processor.

    Args:
        module: MLIR bytecode in the torch dialect.
        settings: How to compile it.

    Raises:
        BrokenDown: The compiler breaks down.
        CompileError: The compiler refuses it, takes too long, or is killed.
    """
    command = [compiler_path(), "-", *settings.arguments(), "-o", "-"]
    try:
        done = subprocess.run(
            command, input=module, capture_output=True, timeout=settings.seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CompileError(
            f"IREE's compiler did not finish within {settings.seconds:g} s; raise "
            'options={"compile_seconds": ...}'
        ) from error
    if done.returncode == -signal.SIGKILL:  # as happens where memory is short
        raise CompileError("IREE's compiler was killed")
    if done.returncode < 0:
        raise CompilerCrashError(f"IREE's compiler crashed (signal {-done.returncode})")
    if done.returncode != 0 or not done.stdout:
        raise CompileError(f"IREE's compiler rejects it: {plain_message(done.stderr.decode())}")
    return done.stdout


_ILLEGAL = re.compile(r"failed to legalize operation 'torch\.([\w.]+)'")


def plain_message(text: str) -> str:
    """Returns what the compiler says, in one line and without places in its input."""
    illegal = _ILLEGAL.search(text)
    if illegal is not None:  # "operator" and "constant" stand for what it does not know at all
        name = illegal.group(1)
        return f"it has no lowering of {name if name.startswith(('aten', 'prim')) else 'it'}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line.partition("error: ")[2] for line in lines if "error: " in line]
    return (told or lines or ["no reason given"])[0][:200]


def make_importer() -> Any:
    """Returns a new importer of FX graphs, with an MLIR module and context of its own."""
    from iree.compiler.extras.fx_importer import FxImporter

    return FxImporter()


def mlir() -> Any:
    """IREE's Python bindings of MLIR."""
    from iree.compiler import ir

    return ir


@functools.cache
def compiler_path() -> str:
    """Returns where the program `iree-compile` is."""
    from iree.compiler.tools import binaries

    path: str = binaries.find_tool("iree-compile")
    return path


_DEFAULTS = {"task_topology_group_count": 0, "task_worker_stack_size": 131072}


def make_driver(name: str, **flags: int) -> Any:
    """Returns a driver of IREE's runtime.

    Args:
        name: "local-sync" or "local-task".
        flags: Of IREE's, which drivers read when they are made; they get their defaults again.
    """
    from iree.runtime import _binding

    _binding.parse_flags(*[f"--{flag}={value}" for flag, value in flags.items()])
    try:
        return _binding.create_hal_driver(name)
    finally:
        _binding.parse_flags(*[f"--{flag}={_DEFAULTS[flag]}" for flag in flags])


def disable_leak_checker() -> None:
    """Disables nanobind's report of leaked objects at exit, in IREE's bindings."""
    from iree.runtime import _binding

    _binding.disable_leak_checker()
