"""Memory that a runtime takes from malloc in each run, without a page fault in each run.

A runtime that allocates its temporaries anew in each run pays for it: glibc maps a block of more
than 32 MiB from the system and unmaps it when it is freed, and the first write to each of its pages
is a page fault. For a training step that takes 400 MiB these are a fifth of its time.

A `Reserve` is a block of the heap that is ours between the runs and free during them. What malloc
is asked for in a run it finds there, for it looks at free blocks before it maps new ones; and when
all is freed, the block is whole again and ours. Nothing else in the process changes, and nobody
else's memory gets between. It reads what glibc's malloc writes before its blocks, so where another
malloc is in force (a preloaded jemalloc, tcmalloc or mimalloc, musl's) there is no reserve. Nor is
there with `DYNAMO_BACKENDS_RESERVE=0`.
"""

import contextlib
import ctypes
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from dynamo_backends._torch_private.forks import fork_safe_rlock
from dynamo_backends.runtime.staging import return_free_memory

LEAST = 4 << 20  # bytes: less than that malloc mostly keeps itself
_CHUNK = 0x1F000  # bytes; malloc never maps a block of less than 128 KiB
_ALIGNMENT = 64  # bytes, that runtimes ask for: of what begins elsewhere malloc cuts off a piece,
# which small blocks take, in the way of the next run
_HEADER = 8  # bytes, that malloc adds to each block
_SLACK = 128  # bytes, that aligned_alloc looks for beyond what it is asked for, at most
_MARGIN = 64  # chunks; nobody writes there, so they cost addresses only
_STEP = 2048  # bytes of the margin that are given up at once; of 1 KiB malloc makes no free piece
_LEAST_PIECE = 1 << 16  # bytes; no smaller ones are taken again after a run
_TRIES = 4  # to find a free piece of the block
_RUNS = 4  # for which a block is made, at least; twice as many for each next one


_FUNCTIONS = ("malloc", "aligned_alloc", "posix_memalign", "realloc", "free")


@functools.cache
def _glibc() -> Any:
    """malloc and free; None if they are not glibc's."""
    try:
        library = ctypes.CDLL(None)
        homes = {_loaded_at(library, name) for name in ("gnu_get_libc_version", *_FUNCTIONS)}
    except (OSError, AttributeError, TypeError):
        return None
    if len(homes) != 1 or None in homes:  # another library's take their place
        return None
    library.malloc.restype = library.aligned_alloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    library.realloc.restype = ctypes.c_void_p
    library.realloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    library.free.restype = None
    return library


class _Place(ctypes.Structure):
    """The struct `Dl_info` of dlfcn.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _loaded_at(library: Any, name: str) -> int | None:
    """Returns the address at which the library begins that a function of the process is from."""
    place = _Place()
    library.dladdr.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    found = library.dladdr(
        ctypes.cast(getattr(library, name), ctypes.c_void_p), ctypes.byref(place)
    )
    return place.base if found else None


def _is_wanted() -> bool:
    """Returns whether the environment does not turn reserves off."""
    return os.environ.get("DYNAMO_BACKENDS_RESERVE", "1") != "0"


class _Room:
    """A part of the block: a margin, which stays ours in runs, and what is free in them.

    A run's large tensor lies at the start. Small ones that come to lie close after it, and stay,
    are in the way of the next large one. Then some of the margin is given up, and the next one
    begins that much earlier.

    Attributes:
        is_enough: Whether what was taken again last has a piece as large as promised.
    """

    def __init__(self, chunks: Sequence[int], margin: int) -> None:
        """Makes a room of adjacent chunks, some of which are the margin."""
        self.is_enough = False
        self.margin = list(chunks[:margin])
        self._start = self.margin[-1] + _CHUNK
        self._end = chunks[-1] + _CHUNK
        for chunk in chunks[margin:]:
            _glibc().free(chunk)  # neighbours become one

    @property
    def region(self) -> range:
        """Addresses that runs may have."""
        return range(self._start, self._end)

    def widen(self) -> bool:
        """Gives up some of the margin; False if there is no more."""
        left = self._start - self.margin[-1] - _STEP
        if left >= _STEP:
            self.margin[-1] = _glibc().realloc(self.margin[-1], left - _HEADER)  # the same
            self._start -= _STEP
        elif len(self.margin) > 1:
            self._start = self.margin.pop()
            _glibc().free(self._start)
        else:
            return False
        return True


class Reserve:
    """A block of the heap; `with reserve:` leaves it to malloc for as long as it takes.

    malloc gives the smallest free piece that is large enough. So there are rooms for large pieces,
    each a little larger than the one before, and a smaller one aside, for what is small and may
    stay, as results do.

    Attributes:
        size: Bytes of the block that runs may allocate from; 0 if there is no block.
    """

    def __init__(self) -> None:
        self.size = 0
        self._piece = 0  # how much a run may need in one piece
        self._rooms: list[_Room] = []
        self._held: list[int] = []
        self._last: int | None = None  # chunk, between the block and the heap's end
        self._thread = 0  # each thread may have a heap of its own
        self._runs = 0
        self._patience = _RUNS
        self._resting: tuple[int, int] | None = None  # size and piece of the block given back
        self._lock = fork_safe_rlock()

    def grow(self, size: int, piece: int | None = None) -> None:
        """Makes the block so large that a run can allocate `size` bytes, if malloc permits.

        Args:
            size: Size of the block.
            piece: How much of it a run needs in one piece; None: all.
        """
        piece = size if piece is None else piece
        if size < LEAST or _glibc() is None:
            return
        with self._lock:
            if self._resting is not None:  # the larger one is made when it wakes
                self._resting = max(size, self._resting[0]), max(piece, self._resting[1])
            elif size > self.size or piece > self._piece:
                self._piece = max(self._piece, piece)
                self._move(max(size, self.size))

    def _move(self, size: int) -> None:
        former = self._forget()  # which malloc shall not find yet
        large = -(-(self._piece + _SLACK) // _CHUNK)
        sizes = [2 + large // 4]
        sizes += (_MARGIN + large + k for k in range(-(-size // self._piece)))
        chunks, self._last = _consecutive_chunks(sum(sizes))
        if self._last is None:
            former += chunks
        else:
            for size_of_room in sizes:
                part, chunks = chunks[:size_of_room], chunks[size_of_room:]
                self._rooms.append(_Room(part, _MARGIN if self._rooms else 1))
            self._thread = threading.get_ident()
            self._runs = 0
            self.size = size
            self._take()
            if not self._is_found():
                self.release()
        for pointer in former:
            _glibc().free(pointer)
        return_free_memory()  # where the former block was, and runs without one

    def release(self) -> None:
        """Gives the block back to malloc."""
        with self._lock:
            for pointer in self._forget():
                _glibc().free(pointer)

    def rest(self) -> None:
        """Gives the block back, until there have been a few runs again."""
        with self._lock:
            if self.size:
                self._resting = self.size, self._piece
                self._runs = 0
                self.release()
                return_free_memory()

    def _wake(self) -> None:
        self._runs += 1
        if self._resting is not None and self._runs > _RUNS:
            resting, self._resting = self._resting, None
            self.grow(*resting)

    def _forget(self) -> list[int]:
        margins = [pointer for room in self._rooms for pointer in room.margin]
        pieces = [*self._held, *margins, *([] if self._last is None else [self._last])]
        self._held, self._rooms, self._last, self.size = [], [], None, 0
        return pieces

    def __enter__(self) -> None:
        """Leaves the block to malloc."""
        with self._lock:
            if self._resting is not None:
                self._wake()
            if not self.size or threading.get_ident() != self._thread:
                return
            self._runs += 1
            self._make_room()
            held, self._held = self._held, []
            for pointer in held:
                _glibc().free(pointer)

    def __exit__(self, *_: object) -> None:
        """Takes the block again, or what there is around what stayed in it."""
        with self._lock:
            if self.size and not self._held and threading.get_ident() == self._thread:
                self._take()

    def _make_room(self) -> None:
        """Widens rooms that lack a large piece; when there is nothing to widen, moves elsewhere."""
        wide = [r.region.start in self._held and r.widen() for r in self._rooms if not r.is_enough]
        if not all(wide) and self._runs >= self._patience:
            self._patience *= 2
            self._move(self.size)

    def _take(self) -> None:
        aside, *large = self._rooms
        for room in reversed(large):  # malloc gives the smallest piece that is large enough
            room.is_enough = self._take_piece(len(room.region) - _HEADER, [room]) is room
        aside.is_enough = True  # for whatever finds a place there
        disturbed = [room for room in large if not room.is_enough]
        if disturbed:
            self._take_pieces(self._piece + _SLACK, disturbed)
        if self._take_piece(len(aside.region) - _HEADER, [aside]) is None:
            self._take_pieces(len(aside.region) // 2, [aside])

    def _take_pieces(self, size: int, rooms: Sequence[_Room]) -> None:
        """Takes all pieces of these rooms, or nearly all if they suffice."""
        while size >= _LEAST_PIECE:
            tries = 1 if all(room.is_enough for room in rooms) else _TRIES
            found = self._take_piece(size, rooms, tries)
            if found is None:
                size //= 2
            else:
                found.is_enough |= size > self._piece

    def _take_piece(self, size: int, rooms: Sequence[_Room], tries: int = 1) -> _Room | None:
        """Returns the one of these rooms where malloc found it; None if that was elsewhere."""
        malloc, free = _glibc().malloc, _glibc().free
        found = None
        elsewhere: list[int] = []  # in smaller free pieces that are large enough, too
        while found is None and len(elsewhere) < tries:
            pointer = malloc(size)
            for room in rooms:
                if pointer in room.region:
                    found = room
            if found is not None:
                self._held.append(pointer)
            elif pointer is None or _is_mapped(pointer):
                free(pointer)
                break
            else:
                elsewhere.append(pointer)
        for pointer in elsewhere:
            free(pointer)
        return found

    def _is_found(self) -> bool:
        """Returns whether malloc looks where it is supposed to."""
        if not all(room.is_enough for room in self._rooms):
            return False
        with self:
            size = -(-self._piece // _ALIGNMENT) * _ALIGNMENT
            pointer = _glibc().aligned_alloc(_ALIGNMENT, size)
            _glibc().free(pointer)
        return any(pointer in room.region for room in self._rooms[1:])

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Gives the block back; at the end of the interpreter, which clears modules, nothing."""
        if not is_finalizing() and getattr(self, "_last", None) is not None:
            self.release()


def _is_mapped(pointer: int) -> bool:
    """Returns whether malloc had no free piece and mapped this block from the system."""
    return bool(ctypes.c_size_t.from_address(pointer - _HEADER).value & 2)


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


def rest() -> None:
    """Gives the shared reserve back until there have been a few runs again.

    To be called before what needs memory of its own, once: compilers, and eager's reference.
    """
    reserve = _shared() if _shared is not None else None
    if reserve is not None:
        reserve.rest()


def memory_for(size: int, wanted: bool = True) -> contextlib.AbstractContextManager[None]:
    """Returns the shared reserve for a program that allocates a large block, if it needs one.

    A small program would only pay for what larger ones have reserved.

    Args:
        size: Bytes.
        wanted: False: there is none in any case.
    """
    if size < LEAST or not wanted or not _is_wanted():
        return contextlib.nullcontext()
    return shared_reserve(size)


def keeping(size: int, run: Callable[..., Any], wanted: bool = True) -> Callable[..., Any]:
    """Returns a function that finds its memory in each call, without page faults.

    Args:
        size: Bytes that live at once, in blocks of any size.
        run: The function.
        wanted: False: it is returned as it is.
    """
    if size < LEAST or not wanted or not _is_wanted():
        return run
    # Results, which stay, may come to lie in the middle. Pages that nobody writes to cost nothing.
    reserve = shared_reserve(2 * size, size // 2)

    def call(*args: Any) -> Any:
        with reserve:
            return run(*args)

    return call
