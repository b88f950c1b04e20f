"""What is noted of each operator while a step is traced, for errors and for draws."""

import hashlib
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_backends._torch_private import disable_current_modes, mark_generator_state
from dynamo_backends.aot.step.program.substitution import nodes_of
from dynamo_backends.aot.step.source_lines import user_line
from dynamo_backends.aot.step.state.unsupported_hooks import refuse_communication
from dynamo_backends.interface.errors import StepCaptureError

_LINE = re.compile(r"(.*?):(\d+)(?:, (.*))?")


class Provenance(TorchDispatchMode):
    """Provenance on each node the user's line, and on draws what eager's generator would draw from.

    Nothing is drawn while tracing. The generator is moved on all the same, and put back in the
    end, so that a checkpoint that puts it back to draw again is seen to do so. It has a seed of
    its own meanwhile, so that one that the step gives it is noticed.
    """

    _SEED = 0x5EED_0F_7A11  # that nobody else takes

    def __enter__(self) -> "Provenance":
        """Keeps the state of torch's generator."""
        self._before = torch.get_rng_state()
        torch.default_generator.manual_seed(self._SEED)
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Puts the generator back."""
        super().__exit__(kind, error, trace)
        try:
            if error is None:
                self._check_seed()
        finally:
            torch.set_rng_state(self._before)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Executes a call, and notes what there is to note on the nodes it leaves."""
        if func.namespace == "prim":  # a tensor's device, or its layout
            return func(*args, **(kwargs or {}))
        self._check_seed()
        refuse_communication(func)
        result, nodes = nodes_of(partial(func, *args, **(kwargs or {})))
        _note_line(nodes)
        if torch.Tag.nondeterministic_seeded in func.tags:
            mark_generator_state(nodes, _next_state())
        return result

    def _check_seed(self) -> None:
        if torch.initial_seed() != self._SEED:
            raise StepCaptureError(
                "the step seeds torch's generator, or gives it another state, before or at "
                f"{user_line()}. One graph draws from the generator as it is before the step: seed "
                'it outside, or pass fallback="split".'
            )


def _note_line(nodes: Sequence[fx.Node]) -> None:
    line = _LINE.fullmatch(user_line())
    if line is None:
        return
    for node in nodes:
        node.meta["stack_trace"] = 'File "{}", line {}, in step\n{}'.format(*line.groups(""))


def _next_state() -> str:
    """Names the state of torch's generator, and moves it on."""
    with disable_current_modes(), torch._C.DisableTorchFunction():
        state = torch.get_rng_state().numpy().tobytes()
        torch.rand(())
    return hashlib.sha256(state).hexdigest()
