"""A bounded number of random programs at several sizes; tests/random_sizes.py runs any number."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import dynamo_backends
from dynamo_backends.interface.registry import get_backend
from tests.graph.programs import Call, Input, Ref, Size
from tests.graph.sized_programs import FIXED, SizedProgram
from tests.random_sizes import SEED, Tally, check_program, run_many
from tests.rotation import rotation

FULL = 1000
BOUNDED = {
    "onnxrt": 4,
    "ov": 2,
    "ts_trace": 4,
    "inductor_freezing": 1,
    "iree": 1,
    "tvm": 1,
    "openxla": 3,
}
"""Programs of each backend without `--full`."""


def usable(name: str) -> str:
    available = get_backend(name).availability()
    if not available.usable:
        pytest.skip(available.reason)
    return name


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of programs that eager runs
def test_any_size_is_eagers(name: str, pytestconfig: pytest.Config):
    count, seed = BOUNDED[usable(name)], rotation()
    if pytestconfig.getoption("--full"):
        count, seed = FULL, SEED
    print(f"{count} programs, seed {seed}")
    tally = run_many(count, seed, name)
    assert tally.programs >= count
    assert tally.torchs_own <= count // 10
    assert tally.calls >= 3 * tally.programs, "few programs run at several sizes"


def wrong_above(limit: int) -> Callable[..., Any]:
    """Compiles what is right for tensors of few rows."""

    def compiled(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> list[Any]:
            large = any(isinstance(x, Tensor) and len(x) > limit for x in args)
            return [y + 1 if large else y for y in module(*args)]

        return run

    return compiled


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch):
    inputs = [Input("x0", ("n", 3)), *(Input(name, shape) for name, shape in FIXED.items())]
    calls = [Call("v0", "mul", (Ref("x0"), Size("x0", 0, "{} // 2")))]
    sizes = [{"n": n, "m": n} for n in (6, 4, 11)]
    program = SizedProgram(inputs, calls, [Ref("v0")], sizes)
    for limit, expected in ((20, contextlib.nullcontext()), (6, pytest.raises(AssertionError))):
        monkeypatch.setattr(dynamo_backends, "compiler", lambda *_, n=limit, **__: wrong_above(n))
        with expected:
            check_program(program, "any", True, Tally())


@pytest.mark.parametrize("name", ["onnxrt", "ov", "ts_trace", "openxla"])
def test_a_view_of_an_input_begins_where_eagers_does(name: str):
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x[x.shape[0] // 2 :], x.exp(), x.view(x.shape[0], -1, 1)[1:]

    compiler = dynamo_backends.compiler(usable(name), cache=False, min_block_size=1, verify="off")
    run = torch.compile(f, backend=compiler, dynamic=True)
    with torch.no_grad():
        for rows in (6, 4, 9):
            for x in (torch.randn(rows, 4), torch.randn(rows + 2, 4)[2:]):
                for result, expected in zip(run(x), f(x), strict=True):
                    torch.testing.assert_close(result, expected)
                    assert result.stride() == expected.stride()
                assert run(x)[0].data_ptr() == f(x)[0].data_ptr()
