"""Memory that runs find without page faults; in processes of their own."""

import platform
from typing import Any

import pytest
import torch

import harness
from dynamo_backends.inductor import runtime as inductor_runtime
from dynamo_backends.runtime import freed_memory
from dynamo_backends.xla import backend as xla_backend

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc's malloc")

SETUP = """
import resource
import torch
import harness
from dynamo_backends.runtime.freed_memory import keep_freed_memory, return_free_memory

MiB = 1 << 20

def faults(function, *inputs, calls=10):
    '''Page faults of each of some calls.'''
    found = []
    for _ in range(calls):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        kept = function(*inputs)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return found

def run():
    torch.ones(25 * MiB)
"""


MOST_GROWTH = 12
"""So many of 40 calls may make the heap larger: small blocks lie in the way of large ones."""


def measured(program: str, variables: dict[str, str] | None = None) -> dict[str, Any]:
    return harness.run_child(["-c", SETUP + program], variables or {})


def faulting(calls: list[int]) -> int:
    """How many calls had to map their memory."""
    return sum(faults > 10_000 for faults in calls)


def test_runs_find_their_memory_again() -> None:
    found = measured("""
without = faults(run)
keep_freed_memory(100 * MiB)
within = faults(run, calls=40)
before = harness.rss_bytes()
return_free_memory()
harness.hand_back(without=without, within=within, returned=before - harness.rss_bytes())
""")
    assert faulting(found["without"]) == 10, "else this test shows nothing"
    assert faulting(found["within"]) <= MOST_GROWTH
    assert found["returned"] > 90 << 20


@pytest.mark.parametrize(
    ("variables", "temporary_bytes"),
    [
        ({"DYNAMO_BACKENDS_RESERVE": "0"}, 1 << 30),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, 1 << 30),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}, 1 << 30),
        ({}, freed_memory.LEAST - 1),
    ],
    ids=["turned off", "set by the user", "tunables", "small"],
)
def test_malloc_stays_as_it_is(variables: dict[str, str], temporary_bytes: int) -> None:
    program = f"keep_freed_memory({temporary_bytes})\nharness.hand_back(runs=faults(run))"
    assert faulting(measured(program, variables)["runs"]) == 10


@pytest.mark.parametrize("name", ["CDLL", "function"])
def test_where_malloc_is_not_glibcs_nothing_is_done(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_library(_: None) -> object:
        if name == "CDLL":
            raise TypeError  # Windows
        return object()  # musl

    monkeypatch.setattr(freed_memory.ctypes, "CDLL", no_library)
    freed_memory._function.cache_clear()
    try:
        assert not freed_memory._keep.__wrapped__()
        freed_memory.return_free_memory()
    finally:
        freed_memory._function.cache_clear()


@pytest.mark.parametrize("backend", ["openxla", "inductor_freezing"])
def test_the_option_turns_it_off(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    for module in (xla_backend, inductor_runtime):
        monkeypatch.setattr(module, "keep_freed_memory", asked.append)
    for wanted in (True, False):
        torch._dynamo.reset()
        asked.clear()
        compiled = torch.compile(lambda x: x @ x + 1, backend=backend, options={"reserve": wanted})
        with torch.no_grad():
            for _ in range(2):  # compiled anew, then from the cache
                compiled(torch.ones(4, 4))
                torch._dynamo.reset()
        assert bool(asked) == wanted


@pytest.mark.long
def test_steps_of_xla_have_it() -> None:
    found = measured("""
import dynamo_backends
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)), torch.nn.Tanh())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(x):
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()

step = dynamo_backends.compile_step(train, model=model, optimizer=optimizer, backend="openxla")
harness.hand_back(runs=faults(step, torch.randn(4096, 512), calls=40))
""")
    assert faulting(found["runs"][:1]) == 1, "else this test shows nothing"
    assert faulting(found["runs"]) <= MOST_GROWTH


@pytest.mark.parametrize(
    "backend", ["openxla", pytest.param("inductor_freezing", marks=pytest.mark.long)]
)
def test_compiled_graphs_have_it(backend: str) -> None:
    if backend == "openxla":
        pytest.importorskip("jax")
    found = measured(f"""
class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 4096), torch.nn.Linear(4096, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())

model, x = Wide().eval(), torch.randn(8192, 8)
with torch.no_grad():
    without = faults(model, x)
    compiled = torch.compile(model, backend="{backend}", options={{"slow": "off"}})
    right = torch.allclose(compiled(x), model(x), atol=1e-4)
    harness.hand_back(without=without, within=faults(compiled, x, calls=40), right=right)
""")
    assert found["right"]
    assert faulting(found["without"]) == 10, "else this test shows nothing"
    assert faulting(found["within"]) <= MOST_GROWTH
