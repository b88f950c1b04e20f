"""One run of an XLA program that writes over what it is given.

Everything is made ready before the run, the run is one call of C code, and nothing that matters has
to be done after it. So a signal, or an error of anybody's, finds the contents of before the run or
of after it. XLA's CPU client reserves all memory before it writes; what it runs after that cannot
report an error, but for calls of libraries. Programs with such calls are run without donation (see
`foreign_calls`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor

from dynamo_backends._torch_private import from_dlpack
from dynamo_backends.interface.errors import StepCaptureError
from dynamo_backends.runtime.atomic import at_once, give_up, until_done
from dynamo_backends.xla import _jaxlib
from dynamo_backends.xla.owned_memory import OwnedBuffer


class Launch:
    """One run, and where its results belong.

    Args:
        tensors: What is updated; the first results are their new contents.
        owned: Where each lives, if in memory of XLA's.
        copied_inputs: The memory of the others, in the order of dimensions of the results.
        taken: Gets the results when all contents are new.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        owned: Sequence[OwnedBuffer | None],
        copied_inputs: list[Tensor],
        taken: list[Any],
    ):
        self._residents = [
            (place, owner, tensor)
            for place, (owner, tensor) in enumerate(zip(owned, tensors, strict=True))
            if owner is not None
        ]
        self._is_copied = [owner is None for owner in owned]
        self._guests = copied_inputs
        self._taken = taken

    def run(self, results: Iterator[list[Any]]) -> None:
        """Executes the program.

        Args:
            results: Executes it when the only element is taken, and gives its results; in C.

        Raises:
            StepCaptureError: XLA failed in the middle; what it had been given is lost.
            BaseException: Whatever stopped it, before or after the run.
        """
        found: list[list[Any]] = []
        contents: list[Tensor] = []
        torch.autograd.graph.increment_version([tensor for _, _, tensor in self._residents])
        for place, owner, _ in self._residents:
            owner.expect(found, place)
        actions: list[Callable[[], Any]] = [partial(found.extend, results)]
        if self._guests:
            arrived = compress(chain.from_iterable(found), self._is_copied)
            exported = map(from_dlpack, map(_jaxlib.export_dlpack, arrived))
            shaped = map(Tensor.view, exported, [guest.shape for guest in self._guests])
            actions.append(partial(contents.extend, shaped))
            actions.append(partial(torch._foreach_copy_, self._guests, contents))
        try:
            at_once([*actions, partial(self._taken.extend, chain(found))])
        except BaseException as error:
            if not found:
                self._check_survival(error)
            else:
                until_done(partial(self._settle, found))
            raise
        self._settle(found)

    def _settle(self, found: list[list[Any]]) -> None:
        """Does what is left to do, if anything is; may be repeated."""
        if not self._taken:
            arrived = compress(found[0], self._is_copied)
            for guest, result in zip(self._guests, arrived, strict=True):
                guest.copy_(from_dlpack(_jaxlib.export_dlpack(result)).view(guest.shape))
            self._taken.extend(found)
        for _, owner, _ in self._residents:
            owner.settle()

    def _check_survival(self, error: BaseException) -> None:
        """After a failed execution: memory that XLA has given up must not be read any more."""
        lost = [tensor for _, owner, tensor in self._residents if owner.buffer.is_deleted()]
        if lost:
            until_done(partial(give_up, lost))
            raise StepCaptureError(
                f"XLA failed in the middle of a run ({error}) and {len(lost)} tensors that it was "
                "updating are lost; they are NaN now. Load the last checkpoint, or start anew."
            ) from error
