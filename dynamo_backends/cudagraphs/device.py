"""Calls CUDA itself: streams, capture, pools. Tests put a double in its place."""

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from dynamo_backends.graph.graph import cuda_unavailable_reason


class Cuda:
    """CUDA as torch has it.

    Attributes:
        kind: torch's type of the devices whose work is captured.
    """

    kind = "cuda"

    def __init__(self) -> None:
        self._side_streams: dict[int, Any] = {}
        self._outside: dict[tuple[int, int], Any] = {}

    def why_not(self) -> str | None:
        """Returns why nothing can be captured here; None if it can."""
        return cuda_unavailable_reason()

    def is_capturing(self) -> bool:
        """Returns whether somebody is recording the current stream."""
        return torch.cuda.is_current_stream_capturing()

    def current_stream(self, index: int) -> Any:
        """Returns the stream on which the calling thread launches work on a device."""
        return torch.cuda.current_stream(index)

    def side_stream(self, index: int) -> Any:
        """The stream of a device on which work is warmed up and recorded: always the same one.

        Libraries such as cuBLAS have a workspace for each stream, which a graph goes on using.
        """
        if index not in self._side_streams:
            self._side_streams[index] = torch.cuda.Stream(index)
        return self._side_streams[index]

    def use(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Inside: `stream` is the current one, and its device the current device."""
        return torch.cuda.stream(stream)

    def wait_outside(self, handle: int, index: int) -> None:
        """Makes a stream of another library wait for the current one.

        Args:
            handle: The other library's `cudaStream_t`.
            index: Index of the device.
        """
        key = handle, index
        if key not in self._outside:
            self._outside[key] = torch.cuda.ExternalStream(handle, device=index)
        self._outside[key].wait_stream(torch.cuda.current_stream(index))

    def new_pool(self) -> Any:
        """Returns a memory pool that graphs can share."""
        return torch.cuda.graph_pool_handle()

    def keep_pool(self, pool: Any, index: int) -> Any:
        """Returns what keeps a pool alive: an empty graph.

        torch gives a pool up with the last graph in it, and records into none that it has given up.

        Args:
            pool: Pool of `new_pool`.
            index: Index of the device.
        """
        graph = self.new_graph()
        with self.capture(graph, pool, self.side_stream(index)):
            pass
        return graph

    def new_graph(self) -> Any:
        """Returns an empty graph; has `replay()`."""
        return torch.cuda.CUDAGraph()

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """Says that a stream uses a tensor other than the one on which its memory was taken."""
        tensor.record_stream(stream)

    @contextlib.contextmanager
    def capture(self, graph: Any, pool: Any, stream: Any) -> Iterator[None]:
        """Inside: what the calling thread launches is recorded and not run.

        torch registers its default generator with the graph, so that each replay draws new numbers.
        Other threads may allocate meanwhile ("thread_local").

        Raises:
            RuntimeError: Something was launched that cannot be recorded.
        """
        torch.cuda.synchronize(stream.device)
        torch.cuda.empty_cache()  # the graph's pool cannot take what the other pool has cached
        with torch.cuda.stream(stream):
            try:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                yield
                with warnings.catch_warnings():  # of tensors without elements it may well be
                    warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                    graph.capture_end()
            except BaseException:
                _abandon(graph, stream.device.index)
                raise


def _abandon(graph: Any, index: int) -> None:
    """Ends a capture that is broken, so that later work is not recorded."""
    with contextlib.suppress(RuntimeError):  # it raises once more; what broke it says more
        graph.capture_end()
    # Some versions of torch leave the generator in the state of being captured.
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())


_driver: Any = Cuda()


def driver() -> Any:
    """Returns the CUDA driver, or the double that tests have installed for it."""
    return _driver


class Order:
    """Serializes the CUDA graphs of one device, which share memory.

    They share memory (a pool, and workspaces of libraries), so they must not run at the same time:
    one lock covers copying inputs, launching and copying results, and a launch waits for the
    stream of the one before.

    Args:
        index: Index of the device.

    Attributes:
        lock: Held while a graph is recorded or launched.
    """

    def __init__(self, index: int):
        self.index = index
        self.lock = threading.RLock()
        self._pool: Any = None
        self._alive: Any = None
        self._last: Any = None

    @property
    def pool(self) -> Any:
        """Memory that graphs share whose results are copied out after each launch."""
        if self._pool is None:
            pool = driver().new_pool()
            self._alive = driver().keep_pool(pool, self.index)
            self._pool = pool
        return self._pool

    def renew_pool(self) -> None:
        """Another pool for later graphs: torch does not record into one again after a failure."""
        self._pool = self._alive = None

    def enter(self) -> Any:
        """Makes the current stream wait for all that was launched so far; returns it."""
        stream = driver().current_stream(self.index)
        if self._last is not None and self._last != stream:
            stream.wait_stream(self._last)
        self._last = stream
        return stream


@functools.cache
def _order(_: Any, index: int) -> Order:
    return Order(index)


def order_of(index: int) -> Order:
    """Returns the order of a device's graphs."""
    return _order(driver(), index)
