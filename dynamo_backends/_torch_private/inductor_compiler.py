"""The C++ compiler as Inductor uses it, and the vectors that it compiles for.

| what | checked |
|---|---|
| `torch._inductor.codecache.CppCodeCache.load` | 2.11+ |
| `torch._inductor.codecache.CppPythonBindingsCodeCache.cpp_compile_command_flags` | 2.13.0 |
| `torch._inductor.cpu_vec_isa.valid_vec_isa_list`, `config.cpp.vec_isa_ok` | 2.13.0 |
| `torch._inductor.cpu_vec_isa.VecISA.check_build`, `.build_arch_flags` | 2.13.0 |
"""

import functools
import os
import shlex
import subprocess
from typing import Any
from unittest import mock

import torch

from dynamo_backends._torch_private.forks import fork_safe_lock


def load_cpp(source: str) -> Any:
    """Compiles C++ as Inductor compiles its own, or finds it in Inductor's cache on disk.

    Args:
        source: May include `torch/csrc/inductor/cpp_prefix.h`, which has the vectors of this
            processor and OpenMP.

    Returns:
        A `ctypes.CDLL`.

    Raises:
        RuntimeError: There is no compiler, or it refuses the source.
    """
    find_vectors()
    return _kernel_cache().load(source)


@functools.cache
def _kernel_cache() -> Any:
    """Inductor's cache of libraries, with its kernels' flags and without a precompiled header."""
    from torch._inductor.codecache import CppCodeCache, CppPythonBindingsCodeCache

    flags = CppPythonBindingsCodeCache.cpp_compile_command_flags
    own = {"cache": {}, "cpp_compile_command_flags": dict(flags)}
    return type("KernelCache", (CppCodeCache,), own)


_vectors = fork_safe_lock()


def find_vectors() -> None:
    """Lets Inductor find the vectors of this processor where torch itself computes with them.

    It would compile a file for each kind of vectors, seconds each, to see whether torch's libraries
    have functions for them. They have if torch's own kernels are for the largest kind. Extensions
    of these (VNNI, AMX) take no functions of torch's, and the compiler says whether it knows them.
    """
    from torch._inductor import config, cpu_vec_isa

    level = torch.backends.cpu.get_cpu_capability()
    largest = level == "AVX512" or (level == "AVX2" and not torch.cpu._is_avx512_supported())
    if largest and config.cpp.vec_isa_ok is None:
        # It remembers what it found, and must not be asked by two threads at a time.
        checks = mock.patch.object(cpu_vec_isa.VecISA, "check_build", _compiler_takes)
        with _vectors, config.patch({"cpp.vec_isa_ok": True}), checks:
            cpu_vec_isa.valid_vec_isa_list()


def _compiler_takes(isa: Any, _code: str) -> bool:
    """In the place of `VecISA.check_build`, which compiles a library that takes no function.

    Its header alone takes a third of a second. A compiler that knows a flag knows what belongs to
    it.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    return _knows_flags(get_cpp_compiler(), isa.build_arch_flags())


@functools.cache
def _knows_flags(compiler: str, flags: str) -> bool:
    command = [*shlex.split(compiler), *flags.split(), "-fsyntax-only", "-x", "c++", os.devnull]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
