"""Memory that a runtime takes from malloc in each run, without a page fault in each run.

A runtime that allocates its temporaries anew in each run pays for it: glibc maps a block of more
than 32 MiB from the system and unmaps it when it is freed, and the first write to each of its pages
is a page fault. For a training step that takes 400 MiB these are a fifth of its time.

A `Reserve` is a block of the heap that is ours between the runs and free during them. What malloc
is asked for in a run it finds there, for it looks at free blocks before it maps new ones; and when
all is freed, the block is whole again and ours. Nothing else in the process changes, and nobody
else's memory gets between. It works with glibc's malloc only; with another there is no reserve.
"""

import ctypes
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from dynamo_backends.toolkit.memory import return_free_memory

LEAST = 1 << 20  # bytes: of less, malloc keeps more than this itself
_CHUNK = 0x1F000  # bytes; malloc never maps a block of less than 128 KiB
_ALIGNMENT = 64  # bytes, that runtimes ask for: of what begins elsewhere malloc cuts off a piece,
# which small blocks take, in the way of the next run
_HEADER = 8  # bytes, that malloc adds to each block
_SLACK = 128  # bytes, that aligned_alloc looks for beyond what it is asked for, at most
_MARGIN = 256  # chunks; nobody writes there, so they cost addresses only
_LEAST_ASIDE = 1 << 16  # bytes; of it no smaller pieces are taken again
_RUNS = 4  # for which a block is made, at least; twice as many for each next one


@functools.cache
def _glibc() -> Any:
    """malloc and free; None if they are not glibc's."""
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018
    except (OSError, AttributeError, TypeError):
        return None
    library.malloc.restype = library.aligned_alloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    library.free.restype = None
    return library


class Reserve:
    """A block of the heap; `with reserve:` leaves it to malloc for as long as it takes.

    malloc gives the smallest free piece that is large enough. So what is small, as results are that
    stay, shall find a smaller piece of its own: some room aside. A run's large block lies at the
    block's start. Small ones that come to lie close after it all the same are in the way of the
    next large block. So there is a margin before it, which stays ours in runs too: some of it is
    given up, and the next large block begins that much earlier.

    Attributes:
        size: Bytes of the block that runs may allocate from; 0 if there is no block.
    """

    def __init__(self) -> None:
        self.size = 0
        self._piece = 0  # how much a run may need in one piece
        self._aside = range(0)
        self._margin: list[int] = []
        self._held: list[int] = []
        self._end: int | None = None
        self._is_whole = True
        self._is_enough = True  # what is held in one piece
        self._thread = 0  # each thread may have a heap of its own
        self._runs = 0
        self._patience = _RUNS

    def grow(self, size: int, piece: int | None = None) -> None:
        """Makes the block so large that a run can allocate `size` bytes, if malloc permits.

        Args:
            size: Of the block.
            piece: How much of it a run needs in one piece; None: all.
        """
        self._piece = max(self._piece, (size if piece is None else piece) + _SLACK)
        if size > self.size and size >= LEAST and _glibc() is not None:
            self._move(size)

    def _move(self, size: int) -> None:
        former = self._forget()  # which malloc shall not find yet
        large = -(-(size + _SLACK) // _CHUNK)
        small = 1 + large // 2  # the large block does not fit there
        chunks, self._end = _consecutive_chunks(1 + small + 2 * _MARGIN + large)
        fence, aside, chunks = chunks[:1], chunks[1 : 1 + small], chunks[1 + small :]
        self._margin = [*fence, *chunks[:_MARGIN]]
        for chunk in [*aside, *chunks[_MARGIN:]]:
            _glibc().free(chunk)  # neighbours become one
        if self._end is not None:
            self._aside = range(aside[0], aside[-1] + _CHUNK)
            self._thread = threading.get_ident()
            self._runs = 0
            self.size = size
            self._take()
        if not (self._end is not None and self._is_whole and self._is_found()):
            self.release()
        for pointer in former:
            _glibc().free(pointer)

    def release(self) -> None:
        """Gives the block back to malloc."""
        for pointer in self._forget():
            _glibc().free(pointer)

    def _forget(self) -> list[int]:
        pieces = [*self._held, *self._margin, *([] if self._end is None else [self._end])]
        self._held, self._margin, self._end, self.size = [], [], None, 0
        return pieces

    def __enter__(self) -> None:
        """Leaves the block to malloc."""
        if not self.size or threading.get_ident() != self._thread:
            return
        self._runs += 1
        if not self._is_enough:
            self._give_way()
        held, self._held = self._held, []
        for pointer in held:
            _glibc().free(pointer)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Takes the block again, or what there is around what stayed in it."""
        if self.size and not self._held and threading.get_ident() == self._thread:
            self._take()

    def _give_way(self) -> None:
        """Makes room before what stayed in the block; when there is none, elsewhere."""
        reaches_margin = self._margin[-1] + _CHUNK in self._held
        if reaches_margin and len(self._margin) > 2:
            _glibc().free(self._margin.pop())
        elif self._runs >= self._patience:
            self._patience *= 2
            self._move(self.size)
            return_free_memory()

    def _take(self) -> None:
        assert self._end is not None
        start = self._margin[-1] + _CHUNK
        region = range(start, self._end)
        self._is_whole = self._take_piece(len(region) - _HEADER, region)
        self._is_enough = self._is_whole or self._take_piece(self._piece, region)
        if not self._is_whole:
            self._take_pieces(self.size, LEAST, region)
        if not self._take_piece(len(self._aside) - _HEADER, self._aside):
            self._take_pieces(len(self._aside) // 2, _LEAST_ASIDE, self._aside)

    def _take_pieces(self, size: int, least: int, region: range) -> None:
        while size >= least:
            if not self._take_piece(size, region):
                size //= 2

    def _take_piece(self, size: int, region: range) -> bool:
        pointer = _glibc().malloc(size)
        if pointer in region:
            self._held.append(pointer)
            return True
        _glibc().free(pointer)
        return False

    def _is_found(self) -> bool:
        """Whether malloc looks where it is supposed to."""
        with self:
            pointer = _glibc().aligned_alloc(64, -(-self.size // 64) * 64)
            _glibc().free(pointer)
        return pointer is not None and self._margin[0] < pointer < (self._end or 0)

    def __del__(self) -> None:
        """Gives the block back."""
        if self._end is not None and not sys.is_finalizing():
            self.release()


def _consecutive_chunks(count: int) -> tuple[list[int], int | None]:
    """Aligned blocks of malloc's side by side, and one more, between them and the heap's end.

    Returns:
        The blocks, and the last one; fewer blocks and None if malloc scatters them.
    """
    malloc, free = _glibc().malloc, _glibc().free
    run: list[int] = []
    others: list[int] = []
    for _ in range(2 * count + 4096):
        chunk = malloc(_CHUNK - _HEADER)
        if chunk is None:
            break
        if chunk % _ALIGNMENT:  # what comes after it shall be aligned
            free(chunk)
            others += [*run, malloc(_CHUNK - _HEADER + _ALIGNMENT - chunk % _ALIGNMENT)]
            run = []
            continue
        if run and chunk != run[-1] + _CHUNK:
            others += run
            run = []
        run.append(chunk)
        if len(run) > count:
            break
    for chunk in others:
        free(chunk)
    return (run[:-1], run[-1]) if len(run) > count else (run, None)


_shared: "weakref.ref[Reserve] | None" = None


def shared_reserve(size: int, piece: int | None = None) -> Reserve:
    """The reserve of all programs of this process, in which a run can allocate `size` bytes.

    It goes when nobody holds it any more. For the arguments see `Reserve.grow`.
    """
    global _shared
    reserve = _shared() if _shared is not None else None
    if reserve is None:
        reserve = Reserve()
        _shared = weakref.ref(reserve)
    reserve.grow(size, piece)
    return reserve


def keeping(size: int, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that finds its memory in each call, without page faults.

    Args:
        size: Bytes that live at once, in blocks of any size.
        run: The function.
    """
    if size < LEAST:
        return run
    # Results, which stay, may come to lie in the middle. Pages that nobody writes to cost nothing.
    reserve = shared_reserve(2 * size, size // 2)

    def call(*args: Any) -> Any:
        with reserve:
            return run(*args)

    return call
