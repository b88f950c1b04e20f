"""Inductor's C++ compiler, vectors and casts, and what it keeps of graphs with frozen weights.

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
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private.forks import fork_safe_lock, fork_safe_rlock


def load_cpp(source: str) -> Any:
    """Compiles C++ with Inductor's flags, or loads it from Inductor's disk cache.

    Args:
        source: May include `torch/csrc/inductor/cpp_prefix.h`, which has the vectors of this
            processor and OpenMP.

    Returns:
        A `ctypes.CDLL`.

    Raises:
        RuntimeError: There is no compiler, or it refuses the source.
    """
    preset_vector_isa()
    return _kernel_cache().load(source)


@functools.cache
def _kernel_cache() -> Any:
    """Returns an Inductor `CppCodeCache` with the flags of its kernels."""
    from torch._inductor.codecache import CppCodeCache, CppPythonBindingsCodeCache

    flags = CppPythonBindingsCodeCache.cpp_compile_command_flags
    own = {"cache": {}, "cpp_compile_command_flags": dict(flags)}
    return type("KernelCache", (CppCodeCache,), own)


_vectors = fork_safe_lock()


def preset_vector_isa() -> None:
    """Presets Inductor's list of CPU vector ISAs, which saves slow test compilations.

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
    """Replaces `VecISA.check_build`, which compiles a library without any function.

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


_CASTS = frozenset({torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default})


def settings_for_casts(graph: fx.Graph) -> dict[str, Any]:
    """Returns the Inductor config for graphs that cast to float16 or bfloat16.

    They make loops in float16 and bfloat16 round after each operator, as eager does, so graphs
    without such a cast do not get them.
    """
    rounds = any(node.target in _CASTS and _is_rounding(node) for node in graph.nodes)
    return {"emulate_precision_casts": True} if rounds else {}


def _is_rounding(node: fx.Node) -> bool:
    source: Any = node.args[0]
    value, result = source.meta.get("val"), node.meta.get("val")
    if not isinstance(value, Tensor) or not isinstance(result, Tensor):
        return False
    if not result.is_floating_point() or result.dtype.itemsize != 2:
        return False
    return value.dtype != result.dtype


_patching = fork_safe_rlock()


@contextmanager
def forgetting_constants() -> Iterator[None]:
    """Frees compiled code and its frozen weights with its caller (context manager).

    Torch would keep modules with weights until the process ends, to remove their files if it is
    asked for that; and the class of each graph that it has pickled, which has the graph's weights.
    """
    from torch._inductor.codecache import FxGraphCachePickler, PyCodeCache

    modules: list[Any] = getattr(PyCodeCache, "modules", [])
    before = set(map(id, modules))
    try:
        yield
    finally:
        for loaded in [each for each in modules if id(each) not in before]:
            if any(isinstance(value, Tensor) for value in vars(loaded).values()):
                with suppress(ValueError):  # another thread was faster
                    modules.remove(loaded)
                name = str(loaded.__name__)
                if sys.modules.get(name) is loaded:
                    del sys.modules[name]
        pickled: dict[type, bool] = getattr(FxGraphCachePickler, "_pickleable_type_cache", {})
        for kind in list(pickled):
            if issubclass(kind, fx.GraphModule):
                pickled.pop(kind, None)


@contextmanager
def packed_weights_in_cache() -> Iterator[None]:
    """Lets Inductor cache graphs with oneDNN-packed weights (context manager).

    Other frozen weights are part of a key by their metadata alone, and are taken from the graph
    that is compiled when a kept one is loaded. Those of oneDNN are refused, as they cannot be
    pickled; by their sizes and dtype they can: the code that Inductor makes hands them to oneDNN.
    """
    from torch._inductor import codecache
    from torch._inductor.freezing_utils import is_frozen_param

    pickler = codecache.FxGraphCachePickler
    validator = getattr(codecache, "CacheabilityValidator", None)
    if validator is None or not hasattr(pickler, "_reduce_tensor"):
        yield  # another version: such graphs are compiled in each process
        return

    def is_packed(tensor: Tensor) -> bool:
        return tensor.is_mkldnn and is_frozen_param(tensor)

    with _patching:
        reduce, check = pickler._reduce_tensor, validator.check_tensor

        def reduce_tensor(self: Any, tensor: Tensor) -> Any:
            if is_packed(tensor):
                return str, (f"oneDNN {tensor.dtype} {tuple(tensor.shape)}",)
            return reduce(self, tensor)

        def check_tensor(tensor: Tensor) -> None:
            if not is_packed(tensor):
                check(tensor)

        with (
            mock.patch.object(pickler, "_reduce_tensor", reduce_tensor),
            mock.patch.object(validator, "check_tensor", staticmethod(check_tensor)),
        ):
            yield
