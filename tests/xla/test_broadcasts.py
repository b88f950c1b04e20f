"""Broadcasts of dimensions of size 1, which YNNPACK computes wrongly in XLA's own form of them."""

import re
import subprocess
import sys
from collections.abc import Callable

import jax
import numpy as np
import pytest
import torch
from jax import lax
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import dynamo_backends
from dynamo_backends.xla import _jaxlib, backend
from dynamo_backends.xla.backend import OpenXLA, XlaOptions
from dynamo_backends.xla.runtime import open_device

Shapes = tuple[tuple[int, ...], ...]

X, Y, PRODUCT = (1, 4, 32, 8), (1, 4, 8, 32), (1, 4, 32, 32)
PROGRAMS: dict[str, tuple[Callable[..., Tensor], Shapes]] = {
    "sum": (lambda x, y: (x + y).sum(-1), ((1, 3, 64, 48), (1, 1, 1, 48))),
    "mean of dimensions": (lambda x, y: (x * y).mean((-1, -2)), ((1, 8, 64, 48), (1, 8, 1, 1))),
    "maximum of a product": (lambda x, y, z: (x @ y + z).amax(-1), (X, Y, (1, 1, 32, 32))),
    "minimum of a product": (lambda x, y, z: (x @ y - z).amin(-1), (X, Y, (1, 1, 1, 32))),
    "sum of a product": (lambda x, y, z: (x @ y * z).sum(-1), (X, Y, (1, 1, 32, 32))),
    "columns": (lambda x, y, z: (x @ y * z).sum(-1), (X, Y, (1, 4, 32, 1))),
    "one number": (lambda x, y, z: (x @ y * z).sum(-1), (X, Y, (1, 1, 1, 1))),
    "matrix": (lambda x, y, z: (x @ y + z).sum(-1), ((64, 32), (32, 64), (1, 64))),
    "softmax": (lambda x, y, z: (x @ y + z).softmax(-1), (X, Y, (1, 1, 32, 32))),
    "softmax of a sum": (lambda x, y: (x + y).softmax(-1), (PRODUCT, (1, 1, 32, 32))),
    "log_softmax": (lambda x, y: (x + y).log_softmax(-1), (PRODUCT, (1, 4, 1, 32))),
    "layer norm": (
        lambda x, y: nn.functional.layer_norm(x + y, (48,)),
        ((1, 3, 64, 48), (1, 1, 64, 48)),
    ),
    "sums of sums": (
        lambda x, y: ((x + y) * (x + y).sum(-1, keepdim=True)).sum(-2),
        ((1, 3, 64, 48), (1, 1, 1, 48)),
    ),
    "variance": (
        lambda x, y: ((x - y) - (x - y).mean(-1, keepdim=True)).square().mean(-1),
        ((1, 1, 64, 48), (1, 1, 64, 1)),
    ),
    "attention, condition": (
        lambda x, y: scaled_dot_product_attention(x, x, x, y > 0),
        ((1, 4, 32, 16), (1, 1, 32, 32)),
    ),
    "attention, numbers": (
        lambda x, y: scaled_dot_product_attention(x, x, x, y),
        ((1, 4, 32, 16), (1, 1, 32, 32)),
    ),
}


def check(names: list[str], dtype: torch.dtype = torch.float32) -> None:
    """Prints the names of programs whose results are not eager's."""
    options = {"fallback": "error", "verify": "off", "cache": False}
    compiler = dynamo_backends.compiler("openxla", **options)
    for name in names:
        function, shapes = PROGRAMS[name]
        inputs = [
            torch.randn(shape, generator=torch.Generator().manual_seed(i), dtype=dtype)
            for i, shape in enumerate(shapes)
        ]
        torch.compiler.reset()
        result = torch.compile(function, backend=compiler)(*inputs)
        if not torch.allclose(result, function(*inputs), 1e-4, 1e-5):
            print(f"{name} is wrong")
        print(f"{name} is done", flush=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_reductions_and_products_of_broadcasts(dtype: str) -> None:
    """In a process of their own: it ended by SIGSEGV."""
    code = f"import torch; from {__name__} import *; check([*PROGRAMS], torch.{dtype})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.splitlines() == [f"{name} is done" for name in PROGRAMS], ended.stderr


def test_broadcasts_repeat_no_dimension_of_size_1() -> None:
    """In a function, in those that it calls and in bodies of loops; each means what it did."""

    def spread(x: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(x, (2, 3, 4, 5), (1, 2, 3))

    def function(x: jax.Array, y: jax.Array, z: jax.Array) -> list[jax.Array]:
        looped = lax.fori_loop(0, 3, lambda i, total: total + spread(x), spread(x))
        return [jax.jit(spread)(y), looped, lax.broadcast_in_dim(z, (4, 1), (0, 1)), spread(x) * z]

    numbers = np.random.default_rng(0).standard_normal
    inputs = [numbers(shape, np.float32) for shape in ((1, 4, 1), (3, 1, 5), (1, 1))]
    lowered = jax.jit(function).lower(*inputs)
    sizes = _sizes(lowered)
    assert any(n == 1 < m for n, m in sizes)
    expected = lowered.compile()(*inputs)
    _jaxlib.bytecode(lowered)
    assert len(_sizes(lowered)) < len(sizes)
    assert not any(n == 1 < m for n, m in _sizes(lowered))
    device = open_device("cpu")
    executable = _jaxlib.compile_program(device.client, device.handle, _jaxlib.bytecode(lowered))
    results = _jaxlib.make_single_device_call(executable, device.handle)(
        [_jaxlib.copy_to_device(device.handle, x) for x in inputs]
    )
    for result, right in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, right, rtol=1e-6)


def _sizes(lowered: jax.stages.Lowered) -> list[tuple[int, int]]:
    """Of all dimensions that broadcasts keep: before and after."""
    found = []
    pattern = r"broadcast_in_dim .*dims = \[(.*)\] : \(tensor<(.*)>\) -> tensor<(.*)>"
    for dims, source, target in re.findall(pattern, lowered.as_text()):
        after = target.split("x")
        places = [int(place) for place in dims.split(", ") if place]
        found += [(int(n), int(after[i])) for n, i in zip(source.split("x"), places, strict=False)]
    return found


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_portable_programs_have_none(platform: str) -> None:
    """They are written for other versions of XLA, whose passes are not known."""
    lowered = jax.jit(lambda x, y: (x + y).sum(1)).trace(np.zeros((8, 9)), np.zeros((1, 9)))
    lowered = lowered.lower(lowering_platforms=(platform,))
    assert (1, 8) in _sizes(lowered)
    _jaxlib.to_portable_artifact(lowered)
    assert (1, 8) not in _sizes(lowered)


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        order = torch.randperm(1024, generator=torch.Generator().manual_seed(0))
        self.bias = nn.Parameter(torch.linspace(-9, 9, 1024)[order].reshape(1, 1, 32, 32))
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.weight) @ x.mT + self.bias).amax(-1)


def test_a_mesh() -> None:
    model, x = Scores(), torch.randn(1, 4, 32, 8)
    options = {"fallback": "error", "verify": "off", "mesh": {"model": 2}}
    run = torch.compile(model, backend="openxla", options=options)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))


def test_a_step() -> None:
    model, x = Scores(), torch.randn(1, 4, 32, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            return model(x)

    options = {"cache": False, "verify": "off"}
    compiled = dynamo_backends.compile_step(
        step, model=model, optimizer=optimizer, backend="openxla", options=options
    )
    for _ in range(3):
        result = compiled(x)
        with torch.no_grad():
            torch.testing.assert_close(result, model(x), rtol=1e-5, atol=1e-5)
    assert (compiled.launches, compiled.compilations, compiled.eager_steps) == (2, 1, 1)


@pytest.mark.parametrize("what", ["passes", "flags", "source"])
def test_executables_in_the_cache_know_how_they_were_compiled(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = OpenXLA().cache_key(XlaOptions())
    if what == "passes":
        monkeypatch.setattr(_jaxlib, "CPU_DISABLED_PASSES", ())
    elif what == "flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=algsimp")
    else:
        monkeypatch.setattr(backend, "_package_version", lambda: "of another source")
    assert OpenXLA().cache_key(XlaOptions()) != key
