"""Functional graphs that AOT Autograd traced, on disk, so that later processes need not trace.

Kept are graphs of inference on CPUs with sizes that are fixed, made of torch's own functions alone,
around which AOT Autograd does nothing at a call: then the graph is all that it makes. They are
found by all that tracing depends on: what Dynamo captured, with the code lines that the graph
names, the inputs, torch's settings, the processor, and the source of this package.
"""

import hashlib
import json
import logging
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.interface.counters import LOADING, time_stage
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.runtime.cache import DiskCache, cache_folder, source_digest
from dynamo_backends.runtime.cpu_info import cpu_cache_key

log = logging.getLogger("dynamo_backends")

FOLDER = "traces"
"""In the cache folder."""

LEAST_S = 0.1
"""Seconds of tracing: graphs that take less are traced again."""

_LIMIT = 256 << 20  # bytes on disk
_STATIC = "static"
_NAMESPACES = frozenset({"aten", "prim", "prims"})
_MODULES = frozenset(
    {"torch", "torch.Tensor", "torch.functional", "torch.nn.functional"}
    | {f"torch.{name}" for name in ("fft", "linalg", "special")}
    | {f"torch._C._{name}" for name in ("fft", "linalg", "nn", "special")}
    | {"_operator", "builtins", "math", "operator"}
)
_OTHERS = frozenset({f"torch._C._{name}" for name in ("set_grad_enabled", "log_api_usage_once")})
_PLAIN = (type(None), type(...), bool, int, float, complex, str)
_SETTINGS = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class _UnnamedError(Exception):
    """Something has no name that another process knows it by."""


class Traces:
    """Caches on disk the functional graphs that AOT Autograd traced.

    Args:
        key: What it is found by; None: it is not kept.
    """

    def __init__(self, key: str | None):
        self._key = key
        self._start = time.perf_counter()

    @property
    def are_kept(self) -> bool:
        """Whether the trace of this graph is kept: see `key_of` for what that says of a graph."""
        return self._key is not None

    def load(self) -> tuple[fx.GraphModule, frozenset[int]] | None:
        """The functional graph, and which inputs of it are parameters and buffers; None: trace it.

        An entry that cannot be read is dropped.
        """
        parts = None if self._key is None else _store().get(self._key)
        if self._key is None or parts is None:
            return None
        from dynamo_backends._torch_private.graph_serialization import unpack_static

        try:
            with time_stage(LOADING):
                return unpack_static(parts), frozenset(json.loads(parts[_STATIC]))
        except Exception as error:  # it was written by somebody else
            log.warning("dropped an unusable trace: %s", brief_error(error))
            _store().drop(self._key)
            return None

    def save(self, gm: fx.GraphModule, static: frozenset[int]) -> None:
        """Keeps a graph, if tracing it took long and it can be packed."""
        if self._key is None or time.perf_counter() - self._start < LEAST_S:
            return
        from dynamo_backends._torch_private.graph_serialization import (
            UnserializableError,
            pack_static,
        )

        try:
            packed = pack_static(gm)
        except UnserializableError as error:
            log.debug("a graph will be traced again in other processes: %s", brief_error(error))
            return
        _store().put(self._key, {**packed, _STATIC: json.dumps(sorted(static)).encode()})


def key_of(captured: fx.GraphModule, inputs: Sequence[Any], kept: Iterable[Any]) -> str | None:
    """Returns the key of a captured graph's trace; None: another process may trace it differently.

    Args:
        captured: Dynamo's graph.
        inputs: Its inputs.
        kept: The operators that are not decomposed.
    """
    digest = hashlib.sha256()
    try:
        for text in (
            *_surroundings(),
            *sorted(map(str, kept)),
            *_inputs(inputs),
            *_calls(captured),
        ):
            digest.update(f"{text}\n".encode())
    except _UnnamedError:
        return None
    except Exception as error:  # on a version of torch that lacks one of these settings
        log.debug("a graph will be traced in each process: %s", brief_error(error))
        return None
    return digest.hexdigest()


def _store() -> DiskCache:
    return DiskCache(cache_folder() / FOLDER, _LIMIT, what="traced graphs")


def _surroundings() -> Iterator[str]:
    yield f"{torch.__version__} {platform.python_version()} {source_digest()} {cpu_cache_key()}"
    yield private.settings_of_tracing()


def _inputs(inputs: Sequence[Any]) -> Iterator[str]:
    """Shapes, strides, dtypes and what else a trace depends on, but no contents.

    Raises:
        _UnnamedError: One is no plain tensor on the CPU, or shares memory with another one.
    """
    storages = set()
    for x in inputs:
        if type(x) not in (Tensor, torch.nn.Parameter) or not private.is_dense_on_cpu(x):
            raise _UnnamedError
        storages.add(private.storage_id(x))
        size, layout = tuple(x.shape), (*x.stride(), x.storage_offset())
        yield f"{type(x).__name__} {size} {layout} {x.dtype} {x.requires_grad} {x.is_inference()}"
    if len(storages) < len(inputs):
        raise _UnnamedError


def _calls(captured: fx.GraphModule) -> Iterator[str]:
    """Returns what the graph calls, with the lines of code.

    Raises:
        _UnnamedError: Another process cannot know it by name, a size is symbolic, or a tensor is
            not on the CPU.
    """
    numbers = {node: i for i, node in enumerate(captured.graph.nodes)}
    static = private.captured_static_inputs(captured)
    for node, number in numbers.items():
        fake = node.meta.get("example_value")
        if isinstance(fake, Tensor) and not _is_fixed_on_cpu(fake):
            raise _UnnamedError
        if node.op == "placeholder":
            yield f"{node.op} {number in static}"
            continue
        target = "" if node.op == "output" else _name(node)
        arguments = [_argument(x, numbers) for x in (node.args, node.kwargs)]
        yield f"{node.op} {target} {arguments} {node.meta.get('stack_trace')!r}"


def _is_fixed_on_cpu(fake: Tensor) -> bool:
    sizes = (*fake.shape, *fake.stride()) if fake.layout == torch.strided else (None,)
    return fake.device.type == "cpu" and all(type(n) is int for n in sizes)


def _name(node: fx.Node) -> str:
    """Returns what a node calls.

    Raises:
        _UnnamedError: It is no function of torch's or Python's, calls graphs, or is no call.
    """
    target: Any = node.target
    if node.meta.get("custom") or node.op not in ("call_function", "call_method"):
        raise _UnnamedError
    if node.op == "call_method":
        return str(target)
    if isinstance(target, private.OpOverload):
        name, is_known = str(target), target.namespace in _NAMESPACES
    else:
        name = private.function_name(target)
        is_known = name in _OTHERS or name.rpartition(".")[0] in _MODULES
    if not is_known or isinstance(target, private.HigherOrderOperator):
        raise _UnnamedError
    return name


def _argument(x: Any, numbers: dict[fx.Node, int]) -> Any:
    """Something that prints the same in each process.

    Raises:
        _UnnamedError: There is nothing such.
    """
    if isinstance(x, fx.Node):
        return f"%{numbers[x]}"
    if isinstance(x, (tuple, list)):
        return type(x).__name__, [_argument(item, numbers) for item in x]
    if isinstance(x, dict):
        return {_argument(k, numbers): _argument(v, numbers) for k, v in x.items()}
    if isinstance(x, slice):
        return "slice", [_argument(end, numbers) for end in (x.start, x.stop, x.step)]
    if type(x) in _PLAIN:
        return repr(x)
    if isinstance(x, _SETTINGS):
        return str(x)
    raise _UnnamedError
