"""Random programs through every pass: the checker holds, and the results are eager's, bit for bit.

    python -m tests.graph.random_graphs --count 2000 --seed 0

A failure prints the smallest program that shows it, as Python source.
"""

import argparse
import copy
import os
import sys
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from hypothesis import HealthCheck, given, note, reject, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st
from rich.progress import Progress
from torch import Tensor, fx

from dynamo_backends import Availability, Backend, Executable, Options, Support
from dynamo_backends._torch_private import core_aten_decompositions
from dynamo_backends.aot.autograd import compile_functional
from dynamo_backends.graph import PASSES, Graph, check
from dynamo_backends.graph.decomposition_tables import decomposition_table
from dynamo_backends.graph.normalize import normalize
from dynamo_backends.pipeline.captured import compile_captured
from tests.checking import aliases
from tests.graph.programs import Program, programs

SEED = 20261121
BANNED = "a tensor being mutated that has internal overlap"  # torch.compile refuses such programs
Route = Callable[[Program, list[Tensor]], Any]


class Interpreter(Backend):
    """Runs graphs node by node; every output is in memory of its own, as with real backends."""

    name = "interpreter"

    def __init__(self, refused: Collection[str] = ()):
        self._refused = refused

    def availability(self) -> Availability:
        return Availability(True, "always")

    def supports(self, node: fx.Node, options: Options) -> Support:
        return Support(str(node.target) not in self._refused, "it is refused on purpose")

    def compile(self, graph: Graph, options: Options) -> Executable:
        check(graph)
        return Interpreted(graph)


class Interpreted(Executable):
    def __init__(self, graph: Graph):
        self._graph = graph

    def bind(self, weights: Sequence[Tensor]) -> Any:
        kept = [w.clone(memory_format=torch.preserve_format) for w in weights]

        def run(inputs: list[Tensor]) -> list[Tensor]:
            values: list[Any] = [None] * len(self._graph.inputs)
            for places, given_values in ((self._graph.weights, kept),
                                         (self._graph.activations, inputs)):  # fmt: skip
                for place, value in zip(places, given_values, strict=True):
                    values[place] = value
            return [separate(x) for x in fx.Interpreter(self._graph.module).run(*values)]

        return run, range(len(weights))


def separate(x: Any) -> Any:
    """A copy with the same strides, even where elements overlap."""
    if not isinstance(x, Tensor):
        return x
    return (
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)
        if not any(s == 0 for s in x.stride())
        else copy.deepcopy(x)
    )


def through_passes(decomposed: bool) -> Route:
    """AOT Autograd, then all passes; the graph after each of them is run and compared."""

    def route(program: Program, inputs: list[Tensor]) -> Any:
        table = decomposition_table(() if decomposed else core_aten_decompositions())
        return compile_functional(program.module(), inputs, _compile_stages, table)(*inputs)

    return route


def _compile_stages(
    gm: fx.GraphModule, kind: Any, static: Any
) -> Callable[[list[Any]], Sequence[Any]]:
    normalized = normalize(gm, kind, freeze=True, static=static)
    stages = [("normalize", normalized.graph.copy())]
    PASSES(normalized.graph, lambda p, graph, _: stages.append((p.name, graph.copy())))

    def run(args: list[Any]) -> Sequence[Any]:
        values = [*args, *normalized.constants]
        state = torch.get_rng_state()
        expected = fx.Interpreter(gm).run(*args)
        after = torch.get_rng_state()
        args.clear()
        for name, graph in stages:
            torch.set_rng_state(state)
            results = fx.Interpreter(graph.module).run(*values)
            assert_same(expected, results, f"after {name}\n{graph.text()}")
            assert torch.equal(torch.get_rng_state(), after), f"other draws after {name}"
        return results

    return run


def through_dynamo(refused: Collection[str]) -> Route:
    """The whole pipeline: Dynamo, AOT Autograd, passes, partition, program."""

    def route(program: Program, inputs: list[Tensor]) -> Any:
        def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
            return compile_captured(Interpreter(refused), gm, examples, Options(min_block_size=1))

        torch._dynamo.reset()
        return torch.compile(program.function(), backend=backend)(*inputs)

    return route


def check_program(program: Program, route: Route) -> None:
    """Compares a program's results, writes to inputs, aliases and draws with eager's."""
    note(program.script())
    theirs, ours = program.make_inputs(), program.make_inputs()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        expected = program.function()(*theirs)
        draws = torch.get_rng_state()
        torch.manual_seed(0)
        try:
            results = route(program, ours)
        except RuntimeError as error:
            if BANNED in str(error):
                reject()
            raise
    assert torch.equal(torch.get_rng_state(), draws), "other draws than eager"
    assert_same(expected, results, "results")
    assert_same(theirs, ours, "inputs")
    assert aliases(tuple(results), tuple(ours)) == aliases(tuple(expected), tuple(theirs))


def assert_same(expected: Any, results: Any, what: str) -> None:
    """Asserts equal bits, dtypes, shapes and strides."""
    for i, (e, r) in enumerate(zip(expected, results, strict=True)):
        if not isinstance(e, Tensor):
            assert e == r, f"{what}: {i} is {r}, not {e}"
            continue
        assert e.dtype == r.dtype, f"{what}: {i} is {r.dtype}, not {e.dtype}"
        assert e.shape == r.shape, f"{what}: {i} has {r.shape}, not {e.shape}"
        if e.numel():
            pairs = zip(e.shape, e.stride(), r.stride(), strict=True)
            assert all(n == 1 or a == b for n, a, b in pairs), f"{what}: strides of {i}"
        assert torch.equal(bits(e), bits(r)), f"{what}: {i} is\n{r}\nnot\n{e}"


def bits(x: Tensor) -> Tensor:
    """A tensor's bits as integers, NaNs made equal."""
    if not x.is_floating_point():
        return x
    x = torch.where(x.isnan(), torch.full_like(x, float("nan")), x).contiguous()
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


ROUTES: tuple[Route, ...] = (
    *[through_passes(decomposed=True)] * 12,
    *[through_passes(decomposed=False)] * 7,
)
REFUSED = ("aten.mul.Tensor", "aten.select.int", "aten.sum.dim_IntList", "aten.add.Tensor",
           "aten.clone.default", "aten.view.default")  # fmt: skip


@st.composite
def routes(draw: st.DrawFn) -> Route:
    """Mostly AOT Autograd and the passes; one in twenty the whole pipeline with Dynamo."""
    which = draw(st.integers(0, len(ROUTES)))
    if which < len(ROUTES):
        return ROUTES[which]
    return through_dynamo(draw(st.sets(st.sampled_from(REFUSED), max_size=2)))


def run_many(count: int, seed: int, progress: Callable[[], None] = lambda: None) -> None:
    """Checks `count` random programs.

    Raises:
        AssertionError: One differs from eager; its note has the smallest such program.
    """

    @with_seed(seed)
    @settings(
        max_examples=count, deadline=None, database=None, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs(), routes())
    def each(program: Program, route: Route) -> None:
        check_program(program, route)
        progress()

    each()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    os.environ["DYNAMO_BACKENDS_CHECK"] = "1"
    print(f"{arguments.count} random programs, seed {arguments.seed}")
    start = time.process_time()
    with Progress() as bar:
        task = bar.add_task("checking", total=arguments.count)
        run_many(arguments.count, arguments.seed, lambda: bar.advance(task))
    print(f"0 differences in {arguments.count} ({time.process_time() - start:.0f} s of CPU time)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
