"""All processes of a job as one: what they do together, and what happens if one does not."""

import atexit
import contextlib
import datetime
import functools
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends.interface.errors import OptionError, RankError, text_of
from dynamo_backends.runtime.ranks.peers import DOUBT, Verdict, listed, told_apart
from dynamo_backends.runtime.ranks.watch import Watch
from dynamo_backends.runtime.ranks.worker import Worker

_ALL_HERE = 300.0  # seconds in which all ranks have to begin
_SLICE = 1.0  # seconds of waiting between two looks at the others
_LONG = datetime.timedelta(days=365)  # who waits in vain is told by `Watch`, not by gloo


def is_shared() -> bool:
    """Returns whether torch.distributed has several processes; its "fake" group is one."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size() > 1 and distributed.get_backend() != "fake"


class Ranks:
    """The processes of the default process group.

    Whatever all of them do together they do in the same order (`together`). Who waits for others
    looks at their signs of life meanwhile.

    Args:
        watch: Listens to the others.
        rank: This process.
        size: How many there are.
        store: Of torch.distributed.
    """

    def __init__(self, watch: Watch, rank: int, size: int, store: Any):
        self.rank = rank
        self.size = size
        self.store = store
        self.host = private.host_of(store)
        self._watch = watch
        self._worker = Worker()
        self._number = 0
        self._failed: Verdict | None = None
        self._group: Any = None
        self._programs: list[str] = []
        self._on_failure: list[Callable[[], None]] = []
        self._before_end: list[Callable[[], None]] = []

    @property
    def has_failed(self) -> bool:
        """Whether steps cannot go on."""
        return self._failed is not None

    @property
    def is_waiting(self) -> bool:
        """Whether a call has not come back."""
        return self._worker.is_busy

    def on_failure(self, call: Callable[[], None]) -> None:
        """Says what to do when steps cannot go on, before the error is raised."""
        self._on_failure.append(call)

    def before_end(self, call: Callable[[], None]) -> None:
        """Says what has to be waited for before this process may end."""
        self._before_end.append(call)

    def together(self, what: str, call: Callable[[], Any], patience: float = math.inf) -> Any:
        """Does what all ranks do at this point.

        Args:
            what: The same on all ranks; what goes after "rank 0" in an error.
            call: Does it; may wait for the other ranks.
            patience: So many seconds it waits for ranks that are slow.

        Raises:
            RankError: One of them has ended, is suspended, or does something else.
        """
        if self._failed is None and self._watch.found is not None:
            self._fail(self._watch.found)
        self._number += 1
        self._watch.note(self._number, what)
        return self.wait(call, patience)

    def wait(self, call: Callable[[], Any], patience: float = math.inf) -> Any:
        """Does what may wait for other ranks, beside this thread.

        Args:
            call: Does it.
            patience: So many seconds.

        Raises:
            RankError: See `together`.
        """
        if self._failed is not None:
            raise _error(self._failed)
        task = self._worker.submit(call)
        until = time.monotonic() + patience
        while not task.wait(_SLICE):
            self._look(in_doubt=False)
            if time.monotonic() > until:
                self._fail(self._watch.behind(patience))
        if task.error is not None:
            self._explain(task.error)
            raise task.error
        return task.result

    def _look(self, in_doubt: bool) -> None:
        verdict = self._watch.verdict(in_doubt)
        if verdict is not None:
            self._fail(verdict)

    def _fail(self, verdict: Verdict) -> None:
        self._failed = verdict
        self._watch.fail(verdict)
        for call in self._on_failure:
            call()
        raise _error(verdict)

    def _explain(self, error: BaseException) -> None:
        """Raises instead of what a broken connection says, if the others' signs explain it."""
        if "gloo" not in text_of(error).lower():
            return
        until = time.monotonic() + 2 * DOUBT
        while time.monotonic() < until:
            self._look(in_doubt=True)
            time.sleep(_SLICE / 4)
        self._fail(Verdict(None, f"an operation of all ranks failed: {text_of(error)}"))

    def _of_group(self, what: str, call: Callable[[Any], Any], patience: float = math.inf) -> Any:
        """Returns an operation of torch.distributed on a group of its own."""
        if self._group is None:
            make = functools.partial(torch.distributed.new_group, backend="gloo", timeout=_LONG)
            self._group = self.together("makes a process group", make)
        return self.together(what, lambda: call(self._group), patience)

    def gathered(self, what: str, value: Any, patience: float = math.inf) -> list[Any]:
        """Returns a picklable value of each rank, on all of them.

        Args:
            what: See `together`.
            value: This rank's.
            patience: So many seconds it waits for ranks that are slow.
        """

        def gather(group: Any) -> list[Any]:
            found: list[Any] = [None] * self.size
            torch.distributed.all_gather_object(found, value, group=group)
            return found

        gathered: list[Any] = self._of_group(what, gather, patience)
        return gathered

    def broadcast(self, what: str, tensors: Sequence[Tensor]) -> None:
        """Gives tensors of the host rank 0's contents, on all ranks."""

        def send(group: Any) -> None:
            for tensor in tensors:
                flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                torch.distributed.broadcast(flat, 0, group=group)
                if self.rank:
                    whole = flat.view(tensor.dtype).reshape(tensor.shape)
                    tensor.detach().copy_(whole)

        self._of_group(what, send)

    def joined(self, what: str, tensor: Tensor, patience: float = math.inf) -> list[Tensor]:
        """Returns a tensor of the host of each rank, all of one shape, on all of them."""
        plain = tensor.detach().contiguous()
        data = plain.reshape(-1).view(torch.uint8)

        def gather(group: Any) -> list[Tensor]:
            found = [torch.empty_like(data) for _ in range(self.size)]
            torch.distributed.all_gather(found, data, group=group)
            return found

        parts = self._of_group(what, gather, patience)
        return [part.view(plain.dtype).reshape(plain.shape) for part in parts]

    def agree(self, what: str, key: str, facts: Sequence[str], advice: str) -> None:
        """Raises on all ranks if they differ.

        Args:
            what: They agree on, such as "compiles a step".
            key: Equal if they do.
            facts: What the key was made of, for people; the first that differs is shown.
            advice: What to do.

        Raises:
            RankError: They differ.
        """
        found = self.gathered(what, (key, list(facts)))
        for rank, (other, theirs) in enumerate(found):
            first, ours = found[0]
            if other != first:
                pair = next(((a, b) for a, b in zip(ours, theirs, strict=False) if a != b), None)
                if pair is None:
                    pair = f"has {len(ours)} of them", f"has {len(theirs)} of them"
                said = told_apart({0: pair[0], rank: pair[1]})
                raise RankError(f"the ranks have different programs: {said}. {advice}", rank)

    def add_program(self, key: str) -> None:
        """Notes a program that all ranks have compiled."""
        if key not in self._programs:
            self._programs.append(key)

    def check_program(self, what: str, key: str) -> None:
        """Looks whether all ranks are about to run the same program, where there are several.

        Raises:
            RankError: They are not.
        """
        if len(self._programs) < 2:
            return
        number = torch.tensor(self._programs.index(key))
        found = [int(each) for each in self.joined("chooses a program", number)]
        for rank, other in enumerate(found):
            if other != found[0]:
                said = f"rank 0 runs program {found[0] + 1}, but rank {rank} program {other + 1}"
                verdict = Verdict(
                    rank,
                    f"ranks do different things at the same point: {said} of those compiled; "
                    f"rank {self.rank} {what}. Give all ranks batches of the same shapes",
                )
                self._fail(verdict)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside: torch's generator on the CPU is rank 0's, on all ranks."""
        mine = torch.get_rng_state()
        shared = mine.clone()
        self.broadcast("draws random numbers", [shared])
        if not self.rank:
            yield
            return
        torch.set_rng_state(shared)
        try:
            yield
        finally:
            torch.set_rng_state(mine)

    def close(self) -> None:
        """Waits for what is under way, and tells the others that this process ends."""
        with contextlib.suppress(Exception):  # whoever waits is told
            for call in self._before_end if self._failed is None else ():
                call()
        with contextlib.suppress(Exception):  # the store may have ended before
            self._watch.leave()


def _error(verdict: Verdict) -> RankError:
    return RankError(
        f"{verdict.text}. Steps on this mesh cannot go on; start again from the last checkpoint.",
        verdict.rank,
    )


_known: dict[tuple[int, int], tuple[Any, Ranks]] = {}


@atexit.register  # when this module is imported, so that it comes after what others do at the end
def _end_here() -> None:
    """Ends a process that an exception ends and that still waits in vain for other ranks.

    Its thread may come back from XLA while Python ends, which would end the process by a signal.
    """
    waits = any(ranks.has_failed and ranks.is_waiting for _, ranks in _known.values())
    if waits and getattr(sys, "last_value", None) is not None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)


def this_job() -> Ranks:
    """Returns the ranks of the default process group; connected on first use, by all of them.

    Raises:
        RankError: Not all ranks have come within five minutes.
        OptionError: The process group has no store that other threads may use.
    """
    world = torch.distributed.group.WORLD
    key = os.getpid(), id(world)
    if key not in _known:
        _known[key] = world, _connected()
    return _known[key][1]


def _connected() -> Ranks:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        stores = [_prefixed(private.default_store()) for _ in range(3)]
    except Exception as error:
        raise OptionError(
            f"mesh spans {size} processes, but the store of their process group cannot be shared "
            f"({text_of(error)}). Use torchrun, or init_process_group with init_method='env://' "
            "or 'tcp://…'."
        ) from error
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        keeper: tuple[str, int | None] = ("torchrun's agent, which holds the store,", None)
    else:
        keeper = "rank 0, whose process holds torch.distributed's store,", 0
    watch = Watch(stores[0], stores[1], rank, size, *keeper)
    until = time.monotonic() + _ALL_HERE
    watch.start()
    ranks = Ranks(watch, rank, size, stores[2])
    atexit.register(ranks.close)
    while missing := [r for r in range(size) if not stores[2].check([f"signs/{r}"])]:
        if time.monotonic() > until:
            raise RankError(
                f"{listed(missing)} did not come to what all ranks do together within "
                f"{_ALL_HERE:.0f} seconds of this one: compile_step(mesh=…), or a graph with "
                "collectives.",
                missing[0],
            )
        time.sleep(0.02)
    return ranks


def _prefixed(store: Any) -> Any:
    return torch.distributed.PrefixStore("dynamo_backends", store)
