"""Random graphs: what a backend rewrites wrong is found and made small; backends have no such."""

import json
import re
from collections.abc import Callable

import pytest
import torch

from dynamo_backends.cli import main
from dynamo_backends.conformance.catalogue import CheckRunner, Settings, checks
from dynamo_backends.conformance.outcomes import Check, Outcome
from dynamo_backends.conformance.rewrites.graphs import RandomGraph, random_graph
from dynamo_backends.conformance.rewrites.operators import OPERATORS
from dynamo_backends.conformance.rewrites.running import run
from dynamo_backends.conformance.workers import map_in_processes
from dynamo_backends.interface.registry import get_backend
from tests.conformance import planted
from tests.rotation import rotation

MODULE = planted.__name__
SEEDS = 2000
TURN = 50
"""Seeds of each backend at each commit; the first are 0 where the count of commits is 0."""
SEEDS_OF = {
    "openxla": SEEDS,
    "onnxrt": SEEDS,
    "ov": SEEDS,
    "inductor_freezing": SEEDS,
    "tvm": 1000,
    "iree": 1000,
}
"""All of which have run after 40 commits, or 20."""
TO_MEND: dict[str, set[int]] = {}
"""Those that are wrong."""


def first_seed(wanted: Callable[[RandomGraph], object], among: int = SEEDS) -> int:
    return next(seed for seed in range(among) if wanted(random_graph(seed)))


def failures(backend: str, turn: range) -> list[Outcome]:
    settings = Settings(backend, ("rewrites",), rewrites=len(turn), seed=turn.start, limit_s=60.0)
    work = CheckRunner(settings)
    outcomes = map_in_processes(
        work, checks(settings), work.broke_down, processes=1, limit_s=settings.limit_s
    )
    return [outcome for outcome in outcomes if outcome.failed]


def turn_of(backend: str, commits: int) -> range:
    first = commits * TURN % SEEDS_OF[backend]
    return range(first, first + TURN)


def test_turns_have_all_seeds():
    for backend, count in SEEDS_OF.items():
        turns = [turn_of(backend, commits) for commits in range(count // TURN)]
        assert sorted(seed for turn in turns for seed in turn) == list(range(count))


@pytest.mark.parametrize("backend", SEEDS_OF)
def test_backends_compute_what_eager_does(backend: str):
    available = get_backend(backend).availability()
    if not available.usable:
        pytest.skip(available.reason)
    turn = turn_of(backend, rotation())
    print(f"dynamo-backends conformance {backend} --rewrites {len(turn)} --seed {turn.start}")
    failed = {int(o.check.name): o for o in failures(backend, turn)}
    new = [o for seed, o in failed.items() if seed not in TO_MEND.get(backend, ())]
    assert not new, "\n".join(f"{o.check}: {o.reason}\n{o.example}" for o in new)


def test_graphs_depend_on_their_seed_alone():
    sources = [random_graph(seed).source() for seed in range(40)]
    assert [random_graph(seed).source() for seed in reversed(range(40))] == sources[::-1]
    assert len(set(sources)) == 40


def test_graphs_have_all_operators():
    used = {call.template for seed in range(SEEDS) for call in random_graph(seed).calls}
    missing = {row.template for rows in OPERATORS.values() for row in rows} - used
    assert not missing


def test_torchs_own_reference_is_right():
    assert failures("aot_eager", range(30)) == []


@pytest.mark.parametrize(
    ("backend", "pattern", "lines"),
    [
        ("dropping_casts", r"(\w+) = \w+\.(?:half|bfloat16)\(\)\n.* \1\.float\(\)", 2),
        ("cancelling", r"(\w+) = \w+ \* (\S+)\n.* \1 / \2\n", 2),
        ("hiding_zeros", r"\.softmax\(", 1),
    ],
)
def test_a_wrong_rewrite_is_found_and_made_small(backend: str, pattern: str, lines: int):
    seeds = [s for s in range(SEEDS) if re.search(pattern, random_graph(s).source())][:4]
    outcomes = [run(Check("rewrites", str(seed)), f"{MODULE}:{backend}") for seed in seeds]
    wrong = [outcome for outcome in outcomes if outcome.status == "wrong"]
    assert wrong, [outcome.reason for outcome in outcomes]
    for outcome in wrong:
        calls = re.findall(r"^    v\d+ = ", outcome.example, re.MULTILINE)
        assert len(calls) <= lines, outcome.example
        assert f"from {MODULE} import {backend}" in outcome.example


def test_the_program_that_is_printed_runs(capsys: pytest.CaptureFixture[str]):
    pattern = r"(\w+) = \w+\.half\(\)\n.* \1\.float\(\)"
    seed = first_seed(lambda graph: re.search(pattern, graph.source()))
    outcome = run(Check("rewrites", str(seed)), f"{MODULE}:dropping_casts")
    with torch.no_grad():
        exec(outcome.example, {})
    eager, ours = capsys.readouterr().out.splitlines()
    assert eager.startswith("eager ")
    assert ours.startswith("compiled ")
    assert eager.split(" ", 1)[1].strip() != ours.split(" ", 1)[1].strip()


def test_a_crash_is_found_with_its_seed(capsys: pytest.CaptureFixture[str]):
    def is_small(graph: RandomGraph) -> bool:
        (call, *more), (given, *others) = graph.calls, graph.inputs
        return ".tan()" in call.text and not more and not others and len(given.shape) == 1

    seed = first_seed(is_small, 20_000)
    command = ["conformance", f"{MODULE}:crashing_on_tangents", "--rewrites", "1", "--json"]
    assert main([*command, "--seed", str(seed)]) == 1
    (crash,) = json.loads(capsys.readouterr().out)["results"]
    assert (crash["name"], crash["status"]) == (str(seed), "crash")
    assert "x0.tan()" in crash["example"]
    assert "torch.randn([1], dtype=torch.float32)" in crash["example"]
