"""Inductor's C++ kernels of a graph, compiled in one file for each processor.

| what | checked |
|---|---|
| `torch._inductor.async_compile.AsyncCompile`: `cpp_pybinding`, `wait`, `submit` | 2.13.0 |
| `torch._inductor.async_compile.get_compile_threads` | 2.13.0 |
| `torch._inductor.codecache.CppPythonBindingsCodeCache.load_async` | 2.13.0 |
| `torch._inductor.config.cpp_cache_precompile_headers` | 2.13.0 |

Inductor compiles each kernel in a file of its own. Most of that time is the same for every file:
starting the compiler, reading headers, and linking.
"""

import functools
import itertools
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from dynamo_backends._torch_private.forks import fork_safe_lock

log = logging.getLogger("dynamo_backends")

_ENTRY = re.compile(r'extern\s+"C"\s+void\s+kernel\s*\(')
_DEFINITIONS = re.compile(r'extern\s+"C"|^\s*#\s*(?!pragma)', re.MULTILINE)

_BINDINGS = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cstdlib>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace bindings {

void* (*tensor_data)(PyObject*);  // torch's: where a tensor's elements are

template <typename T> T argument(PyObject* given) {
    if constexpr (std::is_pointer_v<T>) {
        return static_cast<T>(tensor_data(given));
    } else if constexpr (std::is_floating_point_v<T>) {
        double value = PyFloat_AsDouble(given);
        if (value == -1 && PyErr_Occurred()) throw std::runtime_error("expected a float");
        return static_cast<T>(value);
    } else {
        static_assert(std::is_integral_v<T>);
        long long value = PyLong_AsLongLong(given);
        if (value == -1 && PyErr_Occurred()) throw std::runtime_error("expected an int");
        return static_cast<T>(value);
    }
}

template <typename... Types, size_t... Places>
void call(void (*kernel)(Types...), PyObject* const* given, std::index_sequence<Places...>) {
    kernel(argument<std::remove_cv_t<Types>>(given[Places])...);
}

template <auto kernel, typename... Types>
PyObject* checked(void (*)(Types...), PyObject* const* given, Py_ssize_t count) {
    try {
        if (count != sizeof...(Types)) throw std::runtime_error("another number of arguments");
        call(kernel, given, std::index_sequence_for<Types...>{});
    } catch (std::exception const& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    } catch (...) {
        PyErr_SetString(PyExc_RuntimeError, "unhandled error");
        return nullptr;
    }
    Py_RETURN_NONE;
}

template <auto kernel> PyObject* function(PyObject*, PyObject* const* given, Py_ssize_t count) {
    return checked<kernel>(kernel, given, count);
}

PyMethodDef functions[] = {
FUNCTIONS
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kernel", nullptr, -1, functions};

}  // namespace bindings

PyMODINIT_FUNC PyInit_kernel(void) {
    const char* address = std::getenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR");
    if (!address) {
        PyErr_SetString(PyExc_RuntimeError, "torch does not say how to read tensors");
        return nullptr;
    }
    bindings::tensor_data = reinterpret_cast<decltype(bindings::tensor_data)>(
        static_cast<uintptr_t>(std::strtoull(address, nullptr, 10)));
    PyObject* module = PyModule_Create(&bindings::definition);
#ifdef Py_GIL_DISABLED
    if (module) PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
    return module;
}
"""


@dataclass(frozen=True, eq=False)
class KernelSource:
    """A kernel's C++ source, split so that it can share a file with others.

    Attributes:
        argtypes: Argtypes of its arguments, in C++.
        source: As Inductor wrote it.
        includes: Its first lines.
        body: What follows. Names in it are its own, if it is in a namespace of its own.
    """

    argtypes: list[str]
    source: str
    includes: tuple[str, ...]
    body: str

    @classmethod
    def parse(cls, argtypes: list[str], source: str) -> "KernelSource | None":
        """Splits a kernel's source; None if it cannot be put into a namespace, as macros."""
        lines = source.strip().splitlines()
        count = next((n for n, x in enumerate(lines) if x and not x.startswith("#include ")), 0)
        body = "\n".join(lines[count:])
        if len(_DEFINITIONS.findall(body)) != 1 or not _ENTRY.search(body):
            return None
        includes = tuple(line for line in lines[:count] if line)
        return cls(argtypes, source, includes, _ENTRY.sub("void kernel(", body))


_lock = fork_safe_lock()
_inside = 0  # compilations; all threads see the same class


@contextmanager
def joining_kernels() -> Iterator[None]:
    """Makes Inductor compile a graph's C++ kernels in few files (context manager)."""
    global _inside
    async_compile: Any = import_module("torch._inductor.async_compile")
    if sys.platform == "win32" or not hasattr(async_compile, "get_compile_threads"):
        yield
        return
    joining = _joining()
    with _lock:
        _inside += 1
        async_compile.AsyncCompile = joining
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                async_compile.AsyncCompile = joining.__base__


@functools.cache
def _joining() -> Any:
    """Returns a subclass of Inductor's `AsyncCompile`, of which each generated module makes one."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._logging import getArtifactLogger

    kernel_code = getArtifactLogger(AsyncCompile.__module__, "kernel_code")

    class Joining(AsyncCompile):  # type: ignore[misc, unused-ignore]
        def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
            kernel = KernelSource.parse(argtypes, source_code)
            if kernel is None:
                return super().cpp_pybinding(argtypes, source_code)
            kernel_code.info("CPP+Bindings Kernel:\n%s", source_code)
            return kernel

        def wait(self, scope: dict[str, Any]) -> None:
            kernels = {name: x for name, x in scope.items() if isinstance(x, KernelSource)}
            try:
                functions = self._load(list(kernels.values()))
            except Exception as error:  # of the compiler: each file by itself may be right
                log.info("kernels are compiled one by one: %s", error)
                functions = {}
            for name, kernel in kernels.items():
                alone = functions.get(kernel)
                if alone is None:
                    alone = super().cpp_pybinding(kernel.argtypes, kernel.source)
                scope[name] = alone
            super().wait(scope)

        def _load(self, kernels: Sequence[KernelSource]) -> dict[KernelSource, Any]:
            groups = group_by_length(kernels, get_compile_threads())
            load: Any = CppPythonBindingsCodeCache.load_async
            files = [load(join_sources(group), submit_fn=self.submit) for group in groups]
            return {
                kernel: getattr(file(), f"kernel{number}")
                for group, file in zip(groups, files, strict=True)
                for number, kernel in enumerate(group)
            }

    return Joining


def group_by_length(kernels: Sequence[KernelSource], count: int) -> list[list[KernelSource]]:
    """Splits kernels into `count` groups of similar source length; empty if too few."""
    if len(kernels) < 2:
        return []
    groups: list[list[KernelSource]] = [[] for _ in range(max(1, min(count, len(kernels))))]
    sizes = [0] * len(groups)
    for kernel in sorted(kernels, key=lambda k: len(k.body), reverse=True):
        least = sizes.index(min(sizes))
        groups[least].append(kernel)
        sizes[least] += len(kernel.body)
    return groups


def join_sources(kernels: Sequence[KernelSource]) -> str:
    """Returns one C++ module with the functions `kernel0`, `kernel1` and so on."""
    includes = dict.fromkeys(line for kernel in kernels for line in kernel.includes)
    bodies = (f"namespace part{n} {{\n{k.body}\n}}" for n, k in enumerate(kernels))
    return "\n".join([*includes, *bodies, _bindings(range(len(kernels)))])


def _bindings(numbers: Iterable[int]) -> str:
    rows = (
        f'    {{"kernel{n}", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>('
        f"function<&part{n}::kernel>)), METH_FASTCALL, nullptr}},"
        for n in numbers
    )
    return _BINDINGS.replace("FUNCTIONS", "\n".join(rows))


_FEW = 4
_compilations = itertools.count()


def defer_precompiled_header() -> AbstractContextManager[Any]:
    """Makes first compilations parse Inductor's header directly (context manager).

    To precompile it takes three times as long as to read it. Later compilations read a
    precompiled header, if the user's setting has them do so, in a third of the time.
    """
    from torch._inductor import config

    name = "cpp_cache_precompile_headers"
    if next(_compilations) >= _FEW or not hasattr(config, name):
        return nullcontext()
    return config.patch({name: False})
