"""What modules and optimizers hold: as it was before a trace, and put back after it."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private import FakeTensor
from dynamo_backends.aot.step.recomputed import names_recomputed
from dynamo_backends.interface.errors import StepCaptureError


class NewStateError(StepCaptureError):
    """An optimizer makes state in a step that is captured."""


class Bindings:
    """Attributes and buffers of modules, and the keys of optimizers' state, before a trace.

    Args:
        models: Whose modules are meant.
        optimizers: Whose state is meant.

    Attributes:
        modules: Each with its attributes and buffers.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]):
        self.modules = [
            (m, dict(vars(m)), dict(m._buffers)) for model in models for m in model.modules()
        ]
        self._states = [(state, dict.fromkeys(state)) for state in _states(optimizers)]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Around a trace, of which nothing stays.

        Raises:
            StepCaptureError: In eager something would stay.
        """
        try:
            yield
            self._refuse_attributes()
            self._refuse_state()
        finally:
            self._put_back()

    def replaced_buffers(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """A name for people, the buffer before, and the fake one that has taken its place."""
        for module, _, buffers in self.modules:
            for key, before in buffers.items():
                now = module._buffers.get(key)
                if now is not before and before is not None and isinstance(now, FakeTensor):
                    yield f"{key!r} of {type(module).__name__}", before, now

    def _refuse_attributes(self) -> None:
        for module, attributes, _ in self.modules:
            recomputed = set(names_recomputed(module))
            for name, value in vars(module).items():
                is_old = name in recomputed or value is attributes.get(name)
                if not is_old and _has_fakes(value):
                    raise StepCaptureError(
                        f"the step keeps a tensor in the attribute {name!r} of "
                        f"{type(module).__name__}, which would be set only while the step is "
                        "captured. Register it as a buffer (register_buffer), or return it from "
                        "the function."
                    )

    def _refuse_state(self) -> None:
        for state, keys in self._states:
            for key in state:
                if key not in keys:
                    raise NewStateError(
                        f"the optimizer makes new state ({key!r}) in the middle of training, which "
                        "one graph cannot hold. Make all state at the first step."
                    )

    def _put_back(self) -> None:
        for module, attributes, buffers in self.modules:
            for name, value in list(vars(module).items()):
                if value is not attributes.get(name) and _has_fakes(value):
                    if name in attributes:
                        vars(module)[name] = attributes[name]
                    else:
                        del vars(module)[name]
            module._buffers.clear()
            module._buffers.update(buffers)
        for state, keys in self._states:
            for key in [k for k in state if k not in keys]:
                del state[key]


def _states(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[dict[Any, Any]]:
    for optimizer in optimizers:
        yield optimizer.state
        yield from optimizer.state.values()


def _has_fakes(value: Any) -> bool:
    leaves = pytree.tree_leaves(value) if not isinstance(value, nn.Module) else []
    return any(isinstance(x, FakeTensor) for x in leaves)
