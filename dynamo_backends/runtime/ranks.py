"""Coordinates all ranks of a distributed job."""

import atexit
import contextlib
import datetime
import functools
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends.interface.errors import OptionError, RankError, error_text
from dynamo_backends.runtime.rank_monitor import RankMonitor, describe_per_rank, make_rank_error

_ALL_HERE = 300.0  # seconds in which all ranks have to begin
_LONG = datetime.timedelta(days=365)  # who waits in vain is told by `RankMonitor`, not by gloo


def is_multiprocess() -> bool:
    """Returns whether torch.distributed has several real processes."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size() > 1 and distributed.get_backend() != "fake"


class RankGroup(RankMonitor):
    """The ranks of the default process group, with collectives on the host.

    Args:
        stores: Stores of torch.distributed; one for each use.
        rank: This process.
        size: How many there are.
        keeper: See `RankMonitor`.
    """

    def __init__(self, stores: tuple[Any, Any, Any], rank: int, size: int, keeper: RankError):
        super().__init__(stores[:2], rank, size, keeper)
        self.store = stores[2]
        self.host = private.host_of(self.store)
        self._group: Any = None
        self._programs: list[str] = []
        self._before_end: list[Callable[[], None]] = []

    def register_exit_wait(self, call: Callable[[], None]) -> None:
        """Registers a function that waits for pending work before the process exits."""
        self._before_end.append(call)

    def _of_group(self, what: str, call: Callable[[Any], Any], patience: float = math.inf) -> Any:
        """Returns an operation of torch.distributed on a group of its own."""
        if self._group is None:
            make = functools.partial(torch.distributed.new_group, backend="gloo", timeout=_LONG)
            self._group = self.run_on_all_ranks("creates a process group", make)
        return self.run_on_all_ranks(what, lambda: call(self._group), patience)

    def all_gather_object(self, what: str, value: Any, patience: float = math.inf) -> list[Any]:
        """Gathers a picklable value from every rank, on all ranks."""
        found: list[Any] = [None] * self.size
        gather = functools.partial(torch.distributed.all_gather_object, found, value)
        self._of_group(what, lambda group: gather(group=group), patience)
        return found

    def broadcast(self, what: str, tensors: Sequence[Tensor]) -> None:
        """Copies rank 0's host tensors to all ranks, in place."""

        def send(group: Any) -> None:
            for tensor in tensors:
                flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                torch.distributed.broadcast(flat, 0, group=group)
                if self.rank:
                    tensor.detach().copy_(flat.view(tensor.dtype).reshape(tensor.shape))

        self._of_group(what, send)

    def all_gather(self, what: str, tensor: Tensor, patience: float = math.inf) -> list[Tensor]:
        """Gathers a host tensor of equal shape from every rank, on all ranks."""
        plain = tensor.detach().contiguous()
        data = plain.reshape(-1).view(torch.uint8)
        parts = [torch.empty_like(data) for _ in range(self.size)]
        gather = functools.partial(torch.distributed.all_gather, parts, data)
        self._of_group(what, lambda group: gather(group=group), patience)
        return [part.view(plain.dtype).reshape(plain.shape) for part in parts]

    def require_agreement(self, what: str, key: str, facts: Sequence[str], advice: str) -> None:
        """Raises `RankError` on all ranks if their keys differ.

        Args:
            what: They agree on, such as "compiles a step".
            key: Equal if they do.
            facts: What the key was made of, for people; the first that differs is shown.
            advice: What to do.

        Raises:
            RankError: They differ.
        """
        found = self.all_gather_object(what, (key, list(facts)))
        first, ours = found[0]
        for rank, (other, theirs) in enumerate(found):
            if other != first:
                pair = next(((a, b) for a, b in zip(ours, theirs, strict=False) if a != b), None)
                if pair is None:
                    pair = f"has {len(ours)} of them", f"has {len(theirs)} of them"
                said = describe_per_rank({0: pair[0], rank: pair[1]})
                raise RankError(f"the ranks have different programs: {said}. {advice}", rank)

    def add_program(self, key: str) -> None:
        """Registers a program that all ranks have compiled, by its key."""
        if key not in self._programs:
            self._programs.append(key)

    def require_same_program(self, what: str, key: str) -> None:
        """Raises `RankError` if ranks are about to run different programs.

        Raises:
            RankError: They are not.
        """
        if len(self._programs) < 2:
            return
        number = torch.tensor(self._programs.index(key))
        first, *others = (int(each) for each in self.all_gather("chooses a program", number))
        for rank, other in enumerate(others, 1):
            if other != first:
                said = f"rank 0 runs program {first + 1}, but rank {rank} runs program {other + 1}"
                text = (
                    f"ranks run different operations at the same point: {said} of the compiled "
                    f"ones; rank {self.rank} {what}. Give all ranks batches of the same shapes"
                )
                self._fail(make_rank_error(rank, text))

    @contextlib.contextmanager
    def share_rank0_generator(self) -> Iterator[None]:
        """Uses rank 0's CPU generator state on all ranks (context manager)."""
        mine = torch.get_rng_state()
        shared = mine.clone()
        self.broadcast("draws random numbers", [shared])
        torch.set_rng_state(shared)
        try:
            yield
        finally:
            if self.rank:
                torch.set_rng_state(mine)

    def close(self) -> None:
        """Waits for pending work and tells other ranks that this process exits."""
        with contextlib.suppress(Exception):  # whoever waits is told
            for call in self._before_end if self._failed is None else ():
                call()
        with contextlib.suppress(Exception):  # the store may have ended before
            self.announce_exit()


_known: dict[tuple[int, int], tuple[Any, RankGroup]] = {}


@atexit.register  # when this module is imported, so that it comes after what others do at the end
def _end_here() -> None:
    """Ends a process that an exception ends and that still waits in vain for other ranks.

    Its thread may come back from XLA while Python ends, which would end the process by a signal.
    """
    waits = any(ranks.is_blocked_forever for _, ranks in _known.values())
    if waits and getattr(sys, "last_value", None) is not None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)


def default_rank_group() -> RankGroup:
    """Returns the ranks of the default process group; connects on first use.

    Raises:
        RankError: Not all ranks have come within five minutes.
        OptionError: The process group has no store that other threads may use.
    """
    world = torch.distributed.group.WORLD
    key = os.getpid(), id(world)
    if key not in _known:
        _known[key] = world, _connected()
    return _known[key][1]


def _connected() -> RankGroup:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    store = lambda: torch.distributed.PrefixStore("dynamo_backends", private.default_store())  # noqa: E731
    try:
        stores = store(), store(), store()
    except Exception as error:
        raise OptionError(
            f"mesh spans {size} processes, but the store of their process group cannot be shared "
            f"({error_text(error)}). Use torchrun, or init_process_group with init_method='env://' "
            "or 'tcp://…'."
        ) from error
    silent = "does not respond: it exited or is suspended"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        keeper = make_rank_error(None, f"torchrun's agent, which holds the store, {silent}")
    else:
        keeper = make_rank_error(
            0, f"rank 0, whose process holds torch.distributed's store, {silent}"
        )
    ranks = RankGroup(stores, rank, size, keeper)
    atexit.register(ranks.close)
    try:
        keys = [ranks.store_key(each) for each in range(size)]
        ranks.store.wait(keys, datetime.timedelta(seconds=_ALL_HERE))
    except Exception as error:
        missing = [each for each in range(size) if not ranks.store.check([ranks.store_key(each)])]
        raise RankError(
            f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} did not reach "
            f"compile_step(mesh=…), or a graph with collectives, within {_ALL_HERE:.0f} seconds of "
            "this rank. Run the same calls on all ranks.",
            missing[0] if missing else None,
        ) from error
    ranks.start_monitoring()
    return ranks
