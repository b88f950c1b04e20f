"""Explaining a function neither uses nor changes what the user has compiled."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.eval_frame import cached_backends

from dynamo_backends import Explainer, explain


class Counting:
    """A backend that counts compilations, those with symbolic sizes, and runs of the graphs."""

    def __init__(self) -> None:
        self.compiled = 0
        self.symbolic = 0
        self.runs = 0

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.compiled += 1
        self.symbolic += any(isinstance(x, torch.SymInt) for x in inputs)

        def run(*args: Any) -> Any:
            self.runs += 1
            return gm.forward(*args)

        return run


def double(x: Tensor) -> Tensor:
    return x * 2


def branches(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def in_a_loop(x: Tensor) -> Tensor:
    for _ in range(2):
        x = x + 1
        torch._dynamo.graph_break()
    return x


def test_the_users_compiled_code_stays():
    mine = Counting()
    compiled = torch.compile(double, backend=mine)
    compiled(torch.ones(3))
    assert len(explain(double, torch.ones(3), backend="eager").graphs) == 1
    compiled(torch.ones(3))
    assert (mine.compiled, mine.runs) == (1, 2)


def test_explaining_compiles_anew_each_time():
    assert [len(explain(double, torch.ones(3), backend="eager").graphs) for _ in range(3)] == [
        1
    ] * 3


def test_a_compiled_function_is_unwrapped():
    mine = Counting()
    compiled = torch.compile(double, backend=mine)
    module = torch.compile(torch.nn.Linear(2, 2), backend=mine)
    assert len(explain(compiled, torch.ones(3), backend="eager").graphs) == 1
    assert len(explain(module, torch.ones(1, 2), backend="eager").graphs) == 1
    assert mine.compiled == 0


def test_sizes_that_the_user_had_do_not_matter_to_an_explanation():
    torch.compile(double, backend=Counting())(torch.ones(3))
    own = Counting()
    explain(double, torch.ones(4), backend=own)
    assert (own.compiled, own.symbolic) == (1, 0)


def test_sizes_that_an_explanation_had_do_not_matter_to_the_user():
    with Explainer(double, backend=Counting()) as call:
        for n in (4, 5, 6):
            call(torch.ones(n))
    assert [r.kind for r in call.explanation().recompilations] == ["shape"]
    mine = Counting()
    compiled = torch.compile(double, backend=mine)
    compiled(torch.ones(3))
    assert (mine.compiled, mine.symbolic) == (1, 0)
    compiled(torch.ones(7))
    explain(double, torch.ones(9), backend="eager")
    compiled(torch.ones(8))
    assert (mine.compiled, mine.symbolic) == (2, 1)


def test_a_function_that_dynamo_gave_up_is_looked_at_again():
    mine = Counting()
    compiled = torch.compile(in_a_loop, backend=mine)
    compiled(torch.ones(3))
    explanation = explain(in_a_loop, torch.ones(3), backend="eager")
    assert explanation.breaks[0].skipped
    compiled(torch.ones(3))
    assert mine.compiled == 0


def test_a_break_explained_does_not_make_dynamo_give_up():
    mine = Counting()

    def until(x: Tensor, stop: bool) -> Tensor:
        for _ in range(2):
            x = x + 1
            if stop:
                torch._dynamo.graph_break()
        return x

    assert explain(until, torch.ones(3), True, backend="eager").breaks[0].skipped
    torch.compile(until, backend=mine)(torch.ones(3), False)
    assert mine.compiled == 1


def test_equal_code_is_not_the_same_code():
    made = [eval("lambda x: x.sin() * 3") for _ in range(2)]
    assert made[0].__code__ == made[1].__code__
    mine = Counting()
    compiled = torch.compile(made[0], backend=mine)
    compiled(torch.ones(3))
    explain(made[1], torch.ones(3), backend="eager")
    compiled(torch.ones(3))
    assert mine.compiled == 1
    assert _debug_get_cache_entry_list(made[1].__code__) == []


def test_nothing_usable_stays_in_dynamos_cache():
    torch.compile(double, backend=Counting())(torch.ones(3))
    backends = len(cached_backends)
    for fn in (double, in_a_loop, branches):
        explain(fn, torch.ones(3), backend="eager")
    assert len(cached_backends) == backends
    entries = {fn: _debug_get_cache_entry_list(fn.__code__) for fn in (double, in_a_loop, branches)}
    assert [entry.code is not None for entry in entries[double]] == [True, False]
    assert entries[in_a_loop] == entries[branches] == []
