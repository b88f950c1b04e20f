"""Compiled functions of which nothing is compiled: said once, counted, refused with an option."""

import copy
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import FallbackRefusedError
from dynamo_backends.bench.measuring import why_uncompiled

X = torch.linspace(-1, 1, 32).reshape(4, 8)
BACKENDS = ("openxla", "onnxrt", "ov", "inductor_freezing", "autotune")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def positions(x: Tensor) -> Tensor:
    return torch.nonzero(x)


def helper(x: Tensor) -> Tensor:
    return torch.nonzero(x)


def breaking_everywhere(x: Tensor) -> list[Any]:
    return [*(helper(x) for _ in range(3)), x.tolist()]


def branching(x: Tensor) -> Tensor:
    for _ in range(2):
        if x.sum() > 0:
            x = x * 2
    return x


def same(x: Tensor) -> Tensor:
    return x


def dense(x: Tensor) -> Tensor:
    return x.contiguous()


@torch.compiler.disable
def in_eager(x: Tensor) -> Tensor:
    return x + 1


def calling_disabled(x: Tensor) -> Tensor:
    return in_eager(x)


NOTHING: dict[str, tuple[Callable[[], Callable[..., Any]], str]] = {
    "lstm": (lambda: nn.LSTM(8, 8), "allow_rnn"),
    "lstm inside": (Recurrent, "allow_rnn"),
    "nonzero": (lambda: positions, "return torch.nonzero(x)"),
    "builtin": (lambda: torch.nonzero, "Dynamic shape operator"),
    "breaks everywhere": (lambda: breaking_everywhere, "return torch.nonzero(x)"),
    "branch in a loop": (lambda: branching, "if x.sum() > 0:"),
    "no operators": (lambda: same, "no operator"),
    "a graph of size 0": (lambda: dense, "no operator"),
    "disabled": (lambda: calling_disabled, "torch.compiler.disable"),
}


def between(x: Tensor) -> Tensor:
    return x[x > 0.5].sum()


def after(x: Tensor) -> Tensor:
    return torch.nonzero(x) * 2


def printing(x: Tensor) -> Tensor:
    y = x.cos()
    print(end="")
    return y.sin()


BROKEN = {"between": between, "after": after, "printing": printing}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    def texts() -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.name == "dynamo_backends"]
        return [text for text in found if "nothing of" in text]

    return texts


ENTRANCES: dict[str, Callable[[Any, str, dict[str, Any]], Callable[..., Any]]] = {
    "torch.compile": lambda fn, name, options: torch.compile(fn, backend=name, options=options),
    "compiler": lambda fn, name, options: torch.compile(
        fn, backend=dynamo_backends.compiler(name, **options)
    ),
    "optimize": lambda fn, name, options: dynamo_backends.optimize(name, options=options)(fn),
}


@pytest.mark.parametrize("case", NOTHING)
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_nothing_compiled_is_said_once_with_cause_and_remedy(
    entrance: str, case: str, warnings_of: Callable[[], list[str]]
):
    made, cause = NOTHING[case]
    run = ENTRANCES[entrance](made(), "ts_trace", {})
    before = dynamo_backends.counters()["uncaptured"]
    with dynamo_backends.record() as reports:
        for _ in range(3):
            run(X)
    (said,) = warnings_of()
    assert said.startswith("ts_trace: nothing of ")
    assert cause in said
    assert dynamo_backends.counters()["uncaptured"] == before + 1
    assert sum(r.ops_on_backend for r in reports) == 0
    assert [r.reverted in said for r in reports if r.reverted] == [True]


@pytest.mark.parametrize("case", NOTHING)
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_fallback_error_refuses_it_at_each_call(entrance: str, case: str):
    made, cause = NOTHING[case]
    run = ENTRANCES[entrance](made(), "ts_trace", {"fallback": "error"})
    for _ in range(2):
        with pytest.raises(FallbackRefusedError) as refused:
            run(X)
        assert cause in str(refused.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_says_and_refuses_it(backend: str, warnings_of: Callable[[], list[str]]):
    torch.compile(Recurrent(), backend=backend)(X)
    assert [text.startswith(f"{backend}: nothing of Recurrent was") for text in warnings_of()] == [
        True
    ]
    for fn in (Recurrent(), positions, after):
        with pytest.raises(FallbackRefusedError, match=f"^{backend}: "):
            torch.compile(fn, backend=backend, options={"fallback": "error"})(X)


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_parts_between_graphs_are_refused_with_their_line(
    entrance: str, case: str, warnings_of: Callable[[], list[str]]
):
    ENTRANCES[entrance](BROKEN[case], "ts_trace", {})(X)
    assert warnings_of() == [], "some of it was compiled"
    run = ENTRANCES[entrance](BROKEN[case], "ts_trace", {"fallback": "error"})
    for _ in range(2):
        with pytest.raises(FallbackRefusedError, match=rf"{__file__}:\d+, "):
            run(X)


def test_module_compile_and_blocks(warnings_of: Callable[[], list[str]]):
    model = Recurrent()
    model.compile(backend="ts_trace")
    model(X)
    assert len(warnings_of()) == 1
    model = Recurrent()
    with dynamo_backends.optimize("ts_trace"):
        model(X)
    assert len(warnings_of()) == 2
    with dynamo_backends.optimize("ts_trace"):
        pass
    with dynamo_backends.optimize("ts_trace"):
        nn.Linear(8, 8)(X)
    assert len(warnings_of()) == 2
    torch.compiler.reset()

    def refused() -> None:
        with dynamo_backends.optimize("ts_trace", options={"fallback": "error"}):
            assert all(x for x in (1, 2)), "what has no operators may run in eager"
            model(X)

    with pytest.raises(FallbackRefusedError, match="allow_rnn"):
        refused()


def test_explain_says_and_refuses_it(warnings_of: Callable[[], list[str]]):
    found = dynamo_backends.explain(Recurrent(), X, backend="ts_trace")
    assert found.notes[-1] == "Nothing was compiled: no operator runs on ts_trace."
    assert "allow_rnn" in str(found)
    assert warnings_of() == [], "the explanation says it"
    assert not dynamo_backends.explain(between, X, backend="ts_trace").notes
    for fn in (Recurrent(), between):
        with pytest.raises(FallbackRefusedError, match=r"in eager"):
            dynamo_backends.explain(fn, X, backend="ts_trace", options={"fallback": "error"})


def test_what_the_user_names_may_run_in_eager():
    def fn(x: Tensor) -> Tensor:
        y = in_eager(x.cos()) * 2
        torch._dynamo.graph_break()
        return y.sin()

    run = torch.compile(fn, backend="ts_trace", options={"fallback": "error"})
    torch.testing.assert_close(run(X), fn(X))


def test_the_functions_own_error_is_raised_and_later_calls_are_compiled():
    def fn(x: Tensor, least: int) -> Tensor:
        if x.shape[0] < least:
            raise ValueError("too few")
        return x.cos() + least

    run = torch.compile(fn, backend="ts_trace", options={"fallback": "error"})
    for _ in range(2):
        with pytest.raises(ValueError, match="too few"):
            run(X, 9)
        with dynamo_backends.record() as reports:
            run(X, 2)
    torch.compiler.reset()
    with dynamo_backends.record() as reports:
        torch.testing.assert_close(run(X, 3), X.cos() + 3)
    assert sum(r.ops_on_backend for r in reports) == 2


def test_models_of_torch_are_compiled_after_one_that_is_skipped(
    warnings_of: Callable[[], list[str]],
):
    torch.compile(nn.LSTM(8, 8), backend="ts_trace")(X)
    linear = nn.Linear(8, 8)
    with dynamo_backends.record() as reports:
        torch.compile(linear, backend="ts_trace")(X)
    # torch 2.15 itself passes over it then; that is said.
    passed_over = torch.__version__ >= "2.15"
    assert (sum(r.ops_on_backend for r in reports) == 0) is passed_over
    assert len(warnings_of()) == 1 + passed_over


def test_graphs_of_inner_functions_and_of_earlier_calls_count(
    warnings_of: Callable[[], list[str]],
):
    def inner(x: Tensor) -> Tensor:
        return x.cos() * 3

    def outer(x: Tensor) -> Tensor:
        for _ in range(2):
            x = inner(x)
            if x.sum() > 1000:
                break
        return x

    for _ in range(2):  # the second object runs what the first one has compiled
        torch.compile(outer, backend="ts_trace")(X)
    assert warnings_of() == []
    torch.compile(branching, backend="ts_trace")(X)
    assert len(warnings_of()) == 1


def test_calls_in_which_nothing_is_to_be_compiled_are_not_judged(
    warnings_of: Callable[[], list[str]],
):
    def fn(x: Tensor) -> Tensor:
        return x.cos()

    def failing(x: Tensor) -> Tensor:
        raise KeyError("mine")

    run = torch.compile(fn, backend="ts_trace")
    with dynamo_backends.run():
        run(X)
    with dynamo_backends.disable():
        run(X)
    with torch.compiler.set_stance("force_eager"):
        run(X)
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        run(X)
    with pytest.raises(KeyError, match="mine"):
        torch.compile(failing, backend="ts_trace")(X)
    with torch.no_grad():
        run(X)
    torch.compile(in_eager, backend="ts_trace", fullgraph=True)
    assert warnings_of() == []
    lstm = torch.compile(Recurrent(), backend="ts_trace")
    with dynamo_backends.disable():
        lstm(X)
    assert warnings_of() == []
    lstm(X)
    assert len(warnings_of()) == 1


def test_calls_after_the_first_run_what_they_ran_before():
    from torch._dynamo.eval_frame import OptimizeContext

    def fn(x: Tensor) -> Tensor:
        return x.cos()

    def hooks(run: Any) -> int:
        cells = run.__closure__
        (context,) = [
            c.cell_contents for c in cells if isinstance(c.cell_contents, OptimizeContext)
        ]
        return len(context.enter_exit_hooks)

    ours, theirs = torch.compile(fn, backend="ts_trace"), torch.compile(fn, backend="eager")
    assert hooks(ours) == hooks(theirs) + 1
    ours(X)
    assert hooks(ours) == hooks(theirs)
    nothing = torch.compile(positions, backend="ts_trace")
    nothing(X)
    assert hooks(nothing) == hooks(theirs)
    strict = torch.compile(positions, backend="ts_trace", options={"fallback": "error"})
    with pytest.raises(FallbackRefusedError):
        strict(X)
    assert hooks(strict) == hooks(theirs) + 1


def test_threads_have_first_calls_of_their_own(warnings_of: Callable[[], list[str]]):
    def work(x: Tensor) -> Tensor:
        return x.cos() * 2

    run, lstm = (torch.compile(f, backend="ts_trace") for f in (work, Recurrent()))
    errors: list[BaseException] = []

    def call() -> None:
        try:
            for _ in range(3):
                run(X)
                lstm(X)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(warnings_of()) == 1


def test_copies_are_checked_too(warnings_of: Callable[[], list[str]]):
    model = torch.compile(Recurrent(), backend="ts_trace")
    copied = copy.deepcopy(model)
    model(X)
    copied(X)
    assert len(warnings_of()) == 2


def test_other_backends_are_left_alone(warnings_of: Callable[[], list[str]]):
    torch.compile(Recurrent(), backend="eager")(X)
    assert warnings_of() == []


def test_importing_changes_nothing_of_dynamo():
    import subprocess

    code = (
        "import torch._dynamo.eval_frame as e; before = e.OptimizeContext.__call__\n"
        "import dynamo_backends.xla, dynamo_backends.capture.first_call\n"
        "assert e.OptimizeContext.__call__ is before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_why_uncompiled():
    compiled = dynamo_backends.GraphReport("ts_trace", "inference", ops_on_backend=1)
    empty = dynamo_backends.GraphReport("ts_trace", "inference")
    chosen = dynamo_backends.GraphReport("autotune", "inference", chosen="eager")
    reverted = dynamo_backends.GraphReport("ts_trace", "inference", reverted="too small")
    assert why_uncompiled([empty, compiled], 2) == ""
    assert why_uncompiled([empty, reverted], 1) == "too small"
    assert why_uncompiled([empty], 1) == "the graphs have no operators"
    assert why_uncompiled([chosen], 1) == ""
    assert why_uncompiled([], 1) == ""
    assert "captured no graph" in why_uncompiled([], 0)


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "dynamo_backends")


def step_of(
    function: Callable[[Tensor], Any], **options: Any
) -> tuple[dict[str, Tensor], Callable[[Tensor], Any]]:
    model = nn.LSTM(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x)[0].sum()
        loss.backward()
        optimizer.step()
        return loss

    chosen = train if function is Recurrent else function
    step = dynamo_backends.compile_step(chosen, model=model, optimizer=optimizer, **options)
    return model.state_dict(), step


@pytest.mark.parametrize("backend", ["openxla", "inductor", "aot_eager"])
def test_a_step_without_operators(backend: str, caplog: pytest.LogCaptureFixture):
    before = dynamo_backends.counters()["uncaptured"]
    step = step_of(same, backend=backend)[1]
    with dynamo_backends.record() as reports:
        assert step(X) is not None
        step(X)
    (text,) = [r.getMessage() for r in caplog.records if "nothing of" in r.getMessage()]
    assert text == (
        f"{backend}: nothing of same was compiled; all of it runs in eager. "
        "There is no operator on tensors to compile."
    )
    assert [r.reverted for r in reports] == [text.partition(": ")[2]]
    assert dynamo_backends.counters()["uncaptured"] == before + 1


def test_a_step_without_operators_is_refused():
    step = step_of(same, backend="openxla", options={"fallback": "error"})[1]
    with pytest.raises(FallbackRefusedError, match="nothing of same was compiled"):
        step(X)


@pytest.mark.parametrize("fallback", ["error", "split"])
def test_a_step_with_an_lstm_is_compiled(fallback: str, caplog: pytest.LogCaptureFixture):
    """Steps are not captured by Dynamo, which passes over LSTMs."""
    state, step = step_of(
        Recurrent, backend="openxla", fallback=fallback, options={"fallback": "error"}
    )
    before = {name: tensor.clone() for name, tensor in state.items()}
    step(X)
    assert all((state[name] != tensor).any() for name, tensor in before.items())
    assert not [r for r in caplog.records if "nothing of" in r.getMessage()]
