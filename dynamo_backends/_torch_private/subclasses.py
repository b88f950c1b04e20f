"""Subclasses of Tensor that wrap other tensors.

| what | checked |
|---|---|
| `torch.utils._python_dispatch.return_and_correct_aliasing` | 2.13* |
| `torch._subclasses.functional_tensor.FunctionalTensor` | 2.13* |
| `torch._C._functorch.is_functorch_wrapped_tensor` | 2.13* |
| `torch.Tensor._make_wrapper_subclass`, `Tensor._is_param`, `._dynamo_static_indices` | 2.13* |
| the descriptors `SubclassGetAttrAOTOutput`, `SavedForBackwards*`, `PlainAOTOutput` | 2.13* |
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import (
    return_and_correct_aliasing as return_and_correct_aliasing,
)


def is_traced(tensor: Tensor) -> bool:
    """Returns whether a tensor stands for another one, while a graph is traced or transformed."""
    if type(tensor) is Tensor:
        return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
    return isinstance(tensor, FakeTensor | FunctionalTensor)


def is_functionalized(tensor: Tensor) -> bool:
    """Returns whether AOT Autograd is making a graph functional in which the tensor is a value."""
    return isinstance(tensor, FunctionalTensor)


def mark_static(tensor: Tensor) -> None:
    """Keeps Dynamo from making the sizes of a tensor symbols.

    It would make one of each number that a view of a wrapper was made with, and then fail at sizes
    that are differences of such.
    """
    if not is_traced(tensor):
        tensor._dynamo_static_indices = set(range(tensor.dim()))  # type: ignore[attr-defined]


def is_parameter(tensor: Tensor) -> bool:
    """Returns whether a tensor of a subclass is a parameter of modules."""
    return isinstance(tensor, torch.nn.Parameter)


def set_data(tensor: Tensor, value: Tensor) -> None:
    """What `tensor.data = value` does, for subclasses that do more."""
    vars(torch._C.TensorBase)["data"].__set__(tensor, value)


def make_wrapper(cls: type, like: Tensor) -> Any:
    """Returns a tensor of a subclass without memory, with the properties of another tensor."""
    return Tensor._make_wrapper_subclass(
        cls,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=like.device,
    )


def ends_of_outputs(graph: fx.Graph) -> Sequence[str]:
    """Where AOT Autograd takes each output of a graph: "wrapped", "saved", "returned" or "read"."""
    outputs: Any = graph.output_node().args[0]
    descs = graph.output_node().meta.get("desc") or [None] * len(outputs)
    return [_ENDS.get(type(desc).__name__, "read") for desc in descs]


_ENDS = {
    "SubclassGetAttrAOTOutput": "wrapped",
    "SavedForBackwardsAOTOutput": "saved",
    "SavedForBackwardsNoVcCheckAOTOutput": "saved",
    "PlainAOTOutput": "returned",
}
