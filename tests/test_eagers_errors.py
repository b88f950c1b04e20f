"""Numbers that a tensor's integers do not hold: eager's error is raised, nothing wraps around."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import dynamo_backends
from tests.backend_checks import usable

CALLS: dict[str, tuple[torch.dtype, Callable[[Tensor], Tensor]]] = {
    "clamp": (torch.int8, lambda x: x.clamp(-1000, 1000)),
    "clamp_min": (torch.int8, lambda x: x.clamp(min=-1000)),
    "clamp of unsigned": (torch.uint8, lambda x: x.clamp(-1, 300)),
    "full_like": (torch.int16, lambda x: torch.full_like(x, 1 << 16)),
    "hardtanh": (torch.int8, lambda x: torch.nn.functional.hardtanh(x, -1000, 1000)),
    "masked_fill": (torch.int8, lambda x: x.masked_fill(x > 0, 1000)),
}


@pytest.mark.parametrize("backend", ["openxla", "onnxrt", "ov", "inductor_freezing"])
def test_numbers_beyond_a_type_raise_as_in_eager(backend: str) -> None:
    compiler = dynamo_backends.compiler(usable(backend))
    for name, (dtype, function) in CALLS.items():
        torch.compiler.reset()
        x = torch.tensor([1, 2, 3], dtype=dtype)
        compiled = torch.compile(lambda x, f=function: f(x + 1), backend=compiler)
        for call in (function, compiled):
            with pytest.raises(RuntimeError, match="without overflow"):
                print(name, call(x))


@pytest.mark.parametrize("backend", ["openxla", "onnxrt", "ov", "inductor_freezing"])
def test_numbers_at_the_bounds_are_computed(backend: str) -> None:
    x = torch.tensor([-128, 3, 127], dtype=torch.int8)

    def function(x: Tensor) -> Tensor:
        return x.clamp(-128, 127) + x.clamp(min=-128)

    compiled = torch.compile(function, backend=dynamo_backends.compiler(usable(backend)))
    assert torch.equal(compiled(x), function(x))
