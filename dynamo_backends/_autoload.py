"""Gives this package the backend names for which torch itself has only stubs.

torch prefers the functions in its own modules over entry points; its `openxla` can only raise
where torch_xla is missing, and its `tvm` calls what TVM has removed. `autoload` runs inside
`import torch` (entry point group "torch.backends"), or when this package is imported, and waits for
torch's stub modules: once one has registered its name, the registration is replaced. It imports
nothing heavy and never raises, since an exception here would break `import torch`.

Tensors on torch_xla's own device still go to torch's function.

Other packages register some of our names when they are imported, and torch refuses a name that it
has loaded already. So those names are theirs from their import on, whatever was imported first;
what was compiled before stays ours.

What `torch.compile` returns for a backend of ours gets a check of its first call, see
`check_first_calls`.

It also tells torch of the logger `dynamo_backends`, if `TORCH_LOGS` names it. torch would find the
package by itself, but import all folders of it to look for loggers, inside `import torch`.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

# torch's module -> (the name that it registers, our compiler)
_STUBS = {
    "torch._dynamo.backends.torchxla": ("openxla", "dynamo_backends.xla"),
    "torch._dynamo.backends.tvm": ("tvm", "dynamo_backends.tvm"),
}

# another package -> (the name of ours that it registers, whether a backend of ours has that name)
_SHARED_NAMES = {
    "torch_tensorrt": ("tensorrt", True),
    "intel_extension_for_pytorch": ("ipex", False),
}


def autoload() -> None:
    """Replaces torch's stubs, now or as soon as torch imports them. May be called repeatedly."""
    with contextlib.suppress(Exception):
        _name_logger()
    with contextlib.suppress(Exception):
        for module in _STUBS:
            if module in sys.modules:
                _replace(module)
        for package in _SHARED_NAMES:
            if package in sys.modules:
                _announce(package)
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())


def _name_logger() -> None:
    """Registers the logger before torch reads `TORCH_LOGS`, which it does after `autoload`.

    Not unless it is named there: torch takes loggers that it knows from the root logger's handlers.
    """
    name = "dynamo_backends"
    if name in os.environ.get("TORCH_LOGS", ""):
        from torch._logging import _internal

        _internal.register_log(name, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the usual finders find these modules, and wraps their execution."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _STUBS and name not in _SHARED_NAMES:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, name)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, name: str):
        self._loader = loader
        self._name = name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        if self._name in _SHARED_NAMES:
            with _released(self._name):
                self._loader.exec_module(module)
            return
        self._loader.exec_module(module)
        with contextlib.suppress(Exception):
            _replace(self._name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _backends() -> dict[str, Callable[..., Any]]:
    """torch's table of loaded backends; empty before torch has one."""
    registry = sys.modules.get("torch._dynamo.backends.registry")
    backends: dict[str, Callable[..., Any]] = getattr(registry, "_COMPILER_FNS", {})
    return backends


@contextlib.contextmanager
def _released(package: str) -> Iterator[None]:
    """While another package is imported it can register a name that torch has loaded from us."""
    name, _ = _SHARED_NAMES[package]
    ours = _backends().get(name)
    if ours is not None and type(ours).__module__.startswith("dynamo_backends."):
        del _backends()[name]
    else:
        ours = None
    try:
        yield
    finally:
        if ours is not None:
            _backends().setdefault(name, ours)
        with contextlib.suppress(Exception):
            _announce(package)


def _announce(package: str) -> None:
    """Has the first use of another package's backend say that there is one of ours."""
    name, is_ours_too = _SHARED_NAMES[package]
    theirs = _backends().get(name)
    module = getattr(theirs, "__module__", None) or ""
    is_theirs = module.partition(".")[0] == package and not hasattr(theirs, "_announced")
    if theirs is None or not is_ours_too or not is_theirs:
        return

    @functools.cache
    def announce() -> None:
        logging.getLogger("dynamo_backends").warning(
            "torch.compile(backend=%r) uses %s's backend because that package was imported. For "
            "this package's backend pass backend=dynamo_backends.compiler(%r).", name, package, name
        )  # fmt: skip

    @functools.wraps(theirs)
    def backend(*args: Any, **kwargs: Any) -> Any:
        announce()
        return theirs(*args, **kwargs)

    backend._announced = True  # type: ignore[attr-defined]
    _backends()[name] = backend


def check_first_calls() -> None:
    """Lets `capture.first_call` see each function that is compiled with a backend of ours.

    Dynamo calls no backend for code that it gives up, and has no hook for that. So its decorator
    (`torch._dynamo.eval_frame.OptimizeContext`, checked with torch 2.11+) is wrapped where a
    backend of ours is first used: where torch's stub of `openxla` is replaced, and where torch asks
    a `Compiler` for its name. What is compiled with other backends stays as it is.
    """
    decorator = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizeContext", None)
    if decorator is None or hasattr(decorator.__call__, "_of_dynamo_backends"):
        return
    original = decorator.__call__

    @functools.wraps(original)
    def call(self: Any, fn: Any) -> Any:
        check = None
        with contextlib.suppress(Exception):
            if _is_ours(_backend_of(self)):
                module = importlib.import_module("dynamo_backends.capture.first_call")
                check = module.get_first_call_check(self, _backend_of(self), fn)
        compiled = original(self, fn)
        if check is not None:
            check.register_compiled(compiled)
        return compiled

    call._of_dynamo_backends = True  # type: ignore[attr-defined]
    decorator.__call__ = call


def _backend_of(context: Any) -> Any:
    """Returns the function to which a Dynamo decorator passes graphs."""
    backend = context.callback
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    return backend


def _is_ours(backend: Any) -> bool:
    compiler = type(getattr(backend, "compiler_fn", backend))
    return compiler.__module__.partition(".")[0] == __package__


def _replace(module: str) -> None:
    from torch._dynamo.backends import registry

    backend, ours = _STUBS[module]
    theirs = registry._COMPILER_FNS.get(backend)
    if theirs is not None and not isinstance(theirs, _Replacement):
        registry._COMPILER_FNS[backend] = _Replacement(backend, ours, theirs)
    check_first_calls()


class _Replacement:
    """Stands in torch's table of backends; loads ours when it is first used."""

    def __init__(self, name: str, ours: str, theirs: Any):
        self.__name__ = name
        self._tags = getattr(theirs, "_tags", ())
        self._ours = ours
        self._theirs = theirs

    def __call__(self, captured: Any, example_inputs: Sequence[Any], **settings: Any) -> Any:
        devices = {getattr(x, "device", None) for x in example_inputs}
        if any(device is not None and device.type == "xla" for device in devices):
            importlib.import_module("dynamo_backends.interface.captures").note_graph()
            return self._theirs(captured, example_inputs, **settings)
        compiler = getattr(importlib.import_module(self._ours), self.__name__)
        return compiler(captured, example_inputs, **settings)
