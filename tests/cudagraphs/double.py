"""A double of CUDA for the CPU: it records operations while "capturing" and replays exactly these.

What CUDA would do wrong, silently or not, it does too, or raises:

- While it records, nothing is computed: new tensors hold garbage, writes have no effect.
- A replay reads and writes the memory that was recorded, at the same addresses. Memory from outside
  that nobody else holds any more is an illegal access.
- Graphs of one pool share memory: a replay destroys what the pool may have put to another use.
- A pool ends with the last graph in it, and cannot be recorded into again.
- Operations that wait for the device, or were never run on the stream before (libraries would
  initialise themselves), end the capture, and its pool cannot be recorded into again.
- Work on several streams must be ordered: an access that did not wait for a write is a race.
"""

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_backends._torch_private import disable_current_modes, storage_users

aten = torch.ops.aten

_WAITS = {"data_dependent_output", "dynamic_output_shape"}
_ALLOCATES = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


class IllegalAccess(Exception):
    """A graph reads or writes memory that has been given back."""


class Race(Exception):
    """Work on two streams touches the same memory, and nothing orders it."""


class Stream:
    """A stream with a vector clock: of each stream, up to where this one has waited for it."""

    def __init__(self, name: str):
        self.name = name
        self.cuda_stream = id(self)
        self.clock: Counter[str] = Counter()

    def tick(self) -> None:
        self.clock[self.name] += 1

    def wait_stream(self, other: "Stream") -> None:
        for name, time in other.clock.items():
            self.clock[name] = max(self.clock[name], time)

    def has_seen(self, access: tuple[str, int]) -> bool:
        name, time = access
        return self.clock[name] >= time


@dataclass
class Accesses:
    """The last write to a storage, and reads since then: stream and its time."""

    storage: StorageWeakRef
    write: tuple[str, int] | None = None
    reads: list[tuple[str, int]] = field(default_factory=list)


@dataclass
class Operation:
    """One recorded call: its arguments, and the new tensors that it made."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[tuple[int, Tensor]]


class Pool:
    """Memory that graphs share."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.living: weakref.WeakSet[Handle] = weakref.WeakSet()
        self.broken = False

    @property
    def ended(self) -> bool:
        """Whether it has been given up."""
        return bool(self.graphs) and not self.living


class Handle:
    """What its owner holds of a graph; the double itself looks at graphs that are gone, too."""

    def __init__(self, graph: "Graph"):
        self.graph = graph

    def replay(self) -> None:
        self.graph.replay()


class Graph:
    """What was recorded."""

    def __init__(self, cuda: "DoubleCuda"):
        self._cuda = cuda
        self.operations: list[Operation] = []
        self.own: dict[int, Tensor] = {}  # storages allocated while recording, by their id
        self.foreign: dict[int, Tensor] = {}
        self.constants: dict[int, Tensor] = {}  # made by `torch.tensor` while recording: numbers
        self.aliases: Counter[int] = Counter()
        self.pool: Pool | None = None
        self.replays = 0

    def alias(self, tensor: Tensor) -> Tensor:
        """Another tensor on the same memory, which does not count as somebody who holds it."""
        storage = tensor.untyped_storage()
        self.aliases[storage._cdata] += 1
        with torch.inference_mode(False):  # or replays could not write to it outside of the mode
            empty = torch.empty(0, dtype=tensor.dtype)
            return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def is_held(self, key: int, alias: Tensor) -> bool:
        return storage_users(alias.untyped_storage()) > self.aliases[key]

    def replay(self) -> None:
        assert self.pool is not None, "an unrecorded graph"
        if self._cuda.is_capturing():
            raise RuntimeError("a graph is replayed while the stream is capturing")
        for key, alias in self.foreign.items():
            if not self.is_held(key, alias):
                raise IllegalAccess("a graph reads memory that has been given back")
        for other in self.pool.graphs:
            if other is not self:
                other.overwritten_by(self)
        self.replays += 1
        for operation in self.operations:
            self._run(operation)

    def _run(self, operation: Operation) -> None:
        if allocates(operation.function):
            return
        with torch.no_grad():
            leaves = pytree.tree_leaves(operation.function(*operation.args, **operation.kwargs))
            for place, output in operation.outputs:
                output.copy_(leaves[place])

    def overwritten_by(self, other: "Graph") -> None:
        """Another graph of the pool runs: whatever it may have taken is destroyed."""
        assert self.pool is not None
        order = self.pool.graphs.index
        for key, alias in self.own.items():
            if order(self) > order(other) or not self.is_held(key, alias):
                poison(alias)


def poison(tensor: Tensor) -> None:
    """Fills all of a tensor's storage with garbage."""
    with disable_current_modes(), torch.inference_mode(False):
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        whole.fill_(0xFF)  # NaN in floating point, -1 in signed integers


def waits(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether CUDA's kernel of a call waits for the device."""
    name = func._schema.name.partition("::")[2]
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors(args[1]))
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        return False
    return bool(_WAITS & {tag.name for tag in func.tags})


def allocates(func: Any) -> bool:
    """Whether a call only takes memory."""
    return func._schema.name.partition("::")[2] in _ALLOCATES


class DoubleCuda:
    """Stands for `cudagraphs.device.Cuda`; the "device" is the CPU.

    Attributes:
        graphs: All that were recorded.
        kept: Storages for which `keep_for` was called.
        outside: Streams of other libraries by their handles.
    """

    kind = "cpu"

    def __init__(self) -> None:
        self.main = Stream("main")
        self._side = Stream("side")
        self.outside: dict[int, Stream] = {}
        self._thread = threading.local()
        self.graphs: list[Graph] = []
        self.kept: set[int] = set()
        self.capturing: Graph | None = None
        self._captured: Stream | None = None  # other threads are on other streams
        self.mode = _Mode(self)

    def why_not(self) -> str | None:
        return None

    def is_capturing(self) -> bool:
        return self.capturing is not None and self.current_stream(0) is self._captured

    def current_stream(self, index: int) -> Stream:
        assert index == 0
        return getattr(self._thread, "stream", self.main)

    def side_stream(self, index: int) -> Stream:
        assert index == 0
        return self._side

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream(0)
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def wait_outside(self, handle: int, index: int) -> None:
        self.outside[handle].wait_stream(self.current_stream(index))

    def new_pool(self) -> Pool:
        return Pool()

    def new_graph(self) -> Handle:
        return Handle(Graph(self))

    def keep_pool(self, pool: Pool, index: int) -> Handle:
        assert index == 0
        kept = self.new_graph()
        kept.graph.pool = pool
        pool.graphs.append(kept.graph)
        pool.living.add(kept)
        return kept

    def keep_for(self, tensor: Tensor, stream: Stream) -> None:
        assert stream is self.current_stream(0)
        self.kept.add(tensor.untyped_storage()._cdata)

    @contextlib.contextmanager
    def capture(self, handle: Handle, pool: Pool, stream: Stream) -> Iterator[None]:
        graph = handle.graph
        if pool.broken:
            raise RuntimeError("already recording to this pool")
        if pool.ended:
            raise RuntimeError("the pool was given up with the last of its graphs")
        assert stream is not self.main, "the default stream cannot be captured"
        assert self.capturing is None, "two captures at the same time"
        self.capturing, self._captured = graph, stream
        active = contextlib.nullcontext() if self.mode.active else self.mode
        try:
            with self.use(stream), active:
                yield
        except BaseException:
            pool.broken = True
            raise
        finally:
            self.capturing = self._captured = None
        graph.pool = pool
        pool.graphs.append(graph)
        pool.living.add(handle)
        self.graphs.append(graph)


class _Mode(TorchDispatchMode):
    """Sees every operation: records it, or runs it on the current stream and looks for races."""

    def __init__(self, cuda: DoubleCuda):
        super().__init__()
        self._cuda = cuda
        self._thread = threading.local()
        self._warm: set[Any] = set()
        self._accesses: dict[int, Accesses] = {}

    @property
    def active(self) -> bool:
        """Whether it sees what the calling thread does."""
        return getattr(self._thread, "depth", 0) > 0

    def __enter__(self) -> Any:
        self._thread.depth = getattr(self._thread, "depth", 0) + 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._thread.depth -= 1
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stream = self._cuda.current_stream(0)
        graph = self._cuda.capturing
        if graph is not None and self._cuda.is_capturing():
            self._check_capturable(func, args, kwargs)
            return self._record(graph, func, args, kwargs)
        if stream is not self._cuda.main:
            self._warm.add(func)
        stream.tick()
        written = {t.untyped_storage()._cdata for t in written_by(func, args, kwargs)}
        for tensor in tensors((args, kwargs)):
            self._access(stream, tensor, tensor.untyped_storage()._cdata in written)
        results = func(*args, **kwargs)
        given = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
        for tensor in tensors(results):
            if tensor.untyped_storage()._cdata not in given:
                self._access(stream, tensor, write=True)
        return results

    def _check_capturable(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if waits(func, args, kwargs):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        if func not in self._warm and not func.is_view and not allocates(func):
            raise RuntimeError(
                f"a library initialises itself while the stream is capturing: {func}"
            )

    def _record(self, graph: Graph, func: Any, args: Any, kwargs: Any) -> Any:
        given = tensors((args, kwargs))
        for tensor in given:
            key = tensor.untyped_storage()._cdata
            if func._schema.name.startswith("aten::lift"):
                graph.constants[key] = graph.alias(tensor)
            if not any(key in known for known in (graph.own, graph.foreign, graph.constants)):
                graph.foreign[key] = graph.alias(tensor)
        written = written_by(func, args, kwargs)
        indices = [t for t in given if t.dtype in (torch.int32, torch.int64)]
        before = [(t.untyped_storage(), t.untyped_storage().clone()) for t in (*written, *indices)]
        for tensor in indices:  # garbage is no index, and nothing but shapes is asked for here
            tensor.untyped_storage().fill_(0)
        generator = torch.get_rng_state()
        results = func(*args, **kwargs)
        torch.set_rng_state(generator)
        for storage, content in reversed(before):
            storage.copy_(content)
        known = {t.untyped_storage()._cdata for t in given}
        made = []
        for place, tensor in enumerate(pytree.tree_leaves(results)):
            if not tensors(tensor):
                continue
            if tensor.untyped_storage()._cdata not in known:
                poison(tensor)
                key = tensor.untyped_storage()._cdata
                graph.own.setdefault(key, graph.alias(tensor))
                made.append((place, graph.alias(tensor)))
        recorded = pytree.tree_map_only(Tensor, graph.alias, (args, kwargs))
        graph.operations.append(Operation(func, *recorded, made))
        return results

    def _access(self, stream: Stream, tensor: Tensor, write: bool) -> None:
        storage = tensor.untyped_storage()
        known = self._accesses.get(storage._cdata)
        if known is None or known.storage.expired():
            known = self._accesses[storage._cdata] = Accesses(StorageWeakRef(storage))
        if known.write is not None and not stream.has_seen(known.write):
            raise Race(f"{stream.name} did not wait for a write on {known.write[0]}")
        now = stream.name, stream.clock[stream.name]
        if not write:
            known.reads.append(now)
            return
        for read in known.reads:
            if not stream.has_seen(read):
                raise Race(f"{stream.name} writes to what {read[0]} may be reading")
        known.write, known.reads = now, []


def tensors(tree: Any) -> list[Tensor]:
    """The tensors that have memory here."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor) and not x.is_meta]


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that a call writes to, by its schema."""
    found: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += tensors(value)
    return found
