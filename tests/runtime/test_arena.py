"""Memory that runs find without page faults; in processes with a heap of their own."""

import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import harness
from dynamo_backends.runtime import arena as reserve_module
from dynamo_backends.runtime.arena import Reserve, keeping, memory_for

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc's malloc")

SETUP = """
import gc, resource, threading
import torch
import harness
from dynamo_backends.runtime.staging import return_free_memory
from dynamo_backends.runtime.arena import Reserve, shared_reserve

MiB = 1 << 20

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def run(reserve, size=100 * MiB, kept=0):
    '''Page faults of a run that needs `size` bytes, and leaves some small blocks behind.'''
    before = faults()
    with reserve:
        left = [torch.ones(4096) for _ in range(kept)]
        torch.ones(size // 4)
    return faults() - before, left
"""


def measured(program: str) -> dict[str, Any]:
    return harness.run_child(["-c", SETUP + program])


def faulting(runs: list[int]) -> int:
    """How many runs had to map their memory."""
    return sum(faults > 10_000 for faults in runs)


def test_runs_find_their_memory_again() -> None:
    found = measured("""
reserve = Reserve()
without = [run(reserve)[0] for _ in range(3)]
reserve.grow(100 * MiB)
within = [run(reserve)[0] for _ in range(40)]
harness.hand_back(without=without, within=within, size=reserve.size)
""")
    assert found["size"] == 100 << 20
    assert min(found["without"]) > 25_000, "else this test shows nothing"
    assert faulting(found["within"]) <= 10


@pytest.mark.long
def test_small_blocks_that_stay_are_avoided() -> None:
    found = measured("""
reserve = Reserve()
reserve.grow(100 * MiB)
results = [run(reserve, kept=5) for _ in range(100)]
harness.hand_back(faults=[faults for faults, _ in results], rss=harness.rss_bytes())
""")
    assert faulting(found["faults"]) <= 25
    assert found["rss"] < 1 << 30, "one block, not one for each of the runs"


@pytest.mark.long
def test_results_lie_aside() -> None:
    """Which come first, and go late; what comes after them has the whole block."""
    found = measured("""
reserve = Reserve()
reserve.grow(100 * MiB)
results, pins, runs = [], [], []
for _ in range(60):
    before = faults()
    with reserve:
        results = [*results[-1:], torch.ones(MiB // 16)]
        large = torch.ones(100 * MiB // 4)
        pins.append(torch.ones(16))
        del large
    runs.append(faults() - before)
harness.hand_back(runs=runs)
""")
    assert faulting(found["runs"][:1]) == 1, "else this test shows nothing"
    assert faulting(found["runs"][1:]) <= 2


def test_it_grows_and_goes() -> None:
    found = measured("""
first, second = shared_reserve(40 * MiB), shared_reserve(100 * MiB)
assert first is second
second.grow(90 * MiB, 30 * MiB)
runs = [run(second)[0] for _ in range(10)]
grown = harness.rss_bytes()
smaller = shared_reserve(MiB).size
del first, second
gc.collect()
return_free_memory()
harness.hand_back(runs=runs, smaller=smaller, freed=grown - harness.rss_bytes())
""")
    assert faulting(found["runs"]) <= 5
    assert found["smaller"] == 100 << 20
    assert found["freed"] > 95 << 20


def test_it_rests_for_a_few_runs() -> None:
    """What is compiled meanwhile, and compared with eager, finds the memory free."""
    found = measured("""
reserve = Reserve()
reserve.grow(100 * MiB)
for _ in range(6):
    run(reserve)
before = harness.rss_bytes()
reserve.rest()
return_free_memory()
resting = before - harness.rss_bytes()
reserve.grow(120 * MiB)  # for a program that was compiled meanwhile
sizes = []
for _ in range(8):
    run(reserve)
    sizes.append(reserve.size)
within = [run(reserve)[0] for _ in range(40)]
harness.hand_back(resting=resting, sizes=sizes, within=within)
""")
    assert found["resting"] > 60 << 20
    assert found["sizes"] == [0] * 4 + [120 << 20] * 4
    assert faulting(found["within"]) <= 10


def test_what_runs_left_outside_of_it_goes_back_to_the_system() -> None:
    found = measured("""
def left_in_the_heap():
    blocks = [torch.ones(5 * MiB) for _ in range(8)]  # glibc keeps blocks of up to 32 MiB
    last = torch.ones(100_000)
    return last

reserve = Reserve()
reserve.grow(60 * MiB)
reserve.rest()
grown = []
for act in (reserve.rest, lambda: reserve.grow(200 * MiB)):
    for _ in range(6):
        run(reserve, 60 * MiB)  # it is awake after these
    kept = [left_in_the_heap() for _ in range(4)]
    before = harness.rss_bytes()
    act()
    grown.append(harness.rss_bytes() - before)
harness.hand_back(grown=grown)
""")
    assert max(found["grown"]) < -(60 << 20)


@pytest.mark.long
def test_it_is_made_for_larger_pieces() -> None:
    found = measured("""
reserve = Reserve()
reserve.grow(200 * MiB, 50 * MiB)
before = [run(reserve)[0] for _ in range(3)]
reserve.grow(100 * MiB)
harness.hand_back(before=before, runs=[run(reserve)[0] for _ in range(10)], size=reserve.size)
""")
    assert found["before"][0] > 10_000, "else this test shows nothing"
    assert faulting(found["runs"]) <= 2
    assert found["size"] == 200 << 20


def test_other_threads_run_without_it() -> None:
    found = measured("""
reserve = Reserve()
reserve.grow(100 * MiB)
there = []
thread = threading.Thread(target=lambda: there.extend(run(reserve)[0] for _ in range(3)))
thread.start()
thread.join()
harness.hand_back(there=there, here=[run(reserve)[0] for _ in range(20)])
""")
    assert faulting(found["there"]) == 3
    assert faulting(found["here"]) <= 5


@pytest.mark.long
def test_a_thread_makes_it_larger_while_another_one_runs() -> None:
    found = measured("""
reserve = Reserve()
reserve.grow(MiB)
running = threading.Semaphore(0)
def grow():
    for size in range(2, 60):
        running.acquire()
        reserve.grow(size * MiB)
thread = threading.Thread(target=grow)
thread.start()
while thread.is_alive():
    running.release()
    run(reserve, 8 * MiB, kept=2)
thread.join()
reserve.grow(60 * MiB)
harness.hand_back(here=[run(reserve, 60 * MiB)[0] for _ in range(10)])
""")
    assert sum(faults > 5_000 for faults in found["here"]) <= 2


def test_nobody_else_gets_it() -> None:
    found = measured("""
reserve = Reserve()
reserve.grow(100 * MiB)
runs = [run(reserve)[0]]
for _ in range(20):
    try:
        with reserve:
            raise RuntimeError
    except RuntimeError:
        pass
    others = [torch.ones(12 * MiB) for _ in range(3)]
    runs.append(run(reserve)[0])
harness.hand_back(runs=runs)
""")
    assert faulting(found["runs"]) <= 5


@pytest.mark.long
def test_steps_of_xla_use_it() -> None:
    found = measured("""
import dynamo_backends
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)), torch.nn.Tanh())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(x):
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()

step = dynamo_backends.compile_step(train, model=model, optimizer=optimizer, backend="openxla")
x = torch.randn(4096, 512)
runs = []
for _ in range(12):
    before = faults()
    step(x)
    runs.append(faults() - before)
harness.hand_back(runs=runs)
""")
    assert faulting(found["runs"][:1]) == 1, "else this test shows nothing"
    assert faulting(found["runs"][1:]) <= 2


def test_without_glibc_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve_module, "_glibc", lambda: None)
    reserve = Reserve()
    reserve.grow(1 << 30)
    with reserve:
        assert reserve.size == 0


SHIM = """
#include <stddef.h>
void *__libc_malloc(size_t), *__libc_realloc(void *, size_t), *__libc_calloc(size_t, size_t);
void __libc_free(void *);
void *malloc(size_t size) { return __libc_malloc(size); }
void *calloc(size_t count, size_t size) { return __libc_calloc(count, size); }
void *realloc(void *old, size_t size) { return __libc_realloc(old, size); }
void free(void *old) { __libc_free(old); }
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_where_malloc_is_another_librarys_there_is_none(tmp_path: Path) -> None:
    source, library = tmp_path / "malloc.c", tmp_path / "libmalloc.so"
    source.write_text(SHIM)
    command = ["gcc", "-shared", "-fPIC", "-fno-builtin", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    program = (
        SETUP
        + """
from dynamo_backends.runtime.arena import keeping, memory_for
kept = memory_for(100 * MiB)
harness.hand_back(size=kept.size, faults=[run(kept)[0] for _ in range(3)])
"""
    )
    found = harness.run_child(["-c", program], {"LD_PRELOAD": str(library)})
    assert found["size"] == 0
    assert faulting(found["faults"]) == 3
    assert harness.run_child(["-c", program])["size"] == 100 << 20


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        pass

    assert not isinstance(memory_for(1 << 30, wanted=False), Reserve)
    assert keeping(1 << 30, run, wanted=False) is run
    monkeypatch.setenv("DYNAMO_BACKENDS_RESERVE", "0")
    assert not isinstance(memory_for(1 << 30), Reserve)
    assert keeping(1 << 30, run) is run


@pytest.mark.parametrize("backend", ["openxla", "inductor_freezing"])
def test_the_option_turns_it_off(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(reserve_module, "LEAST", 0)
    monkeypatch.setattr(
        reserve_module, "shared_reserve", lambda *sizes: asked.append(1) or Reserve()
    )
    for wanted in (True, False):
        torch._dynamo.reset()
        asked.clear()
        compiled = torch.compile(lambda x: x @ x + 1, backend=backend, options={"reserve": wanted})
        with torch.no_grad():
            for _ in range(2):  # compiled anew, then from the cache
                compiled(torch.ones(4, 4))
                torch._dynamo.reset()
        assert bool(asked) == wanted


def test_small_programs_need_none() -> None:
    reserve = Reserve()
    reserve.grow(1000)
    assert reserve.size == 0


@pytest.mark.long
def test_results_in_the_middle_leave_room_enough() -> None:
    """As in a program of many blocks, whose result lies between them."""
    found = measured("""
from dynamo_backends.runtime.arena import keeping

def program():
    first = torch.ones(10 * MiB)
    result = torch.ones(4096)
    second = first + 1
    del first
    return result, second.sum()

def runs(function):
    kept, found = [], []
    for _ in range(40):
        before = faults()
        kept = function()
        found.append(faults() - before)
    return found

without = runs(program)  # first: a reserve that malloc does not find is given back to its heap
within = runs(keeping(80 * MiB, program))
small = keeping(1000, program) is program
harness.hand_back(without=without, within=within, small=small)
""")
    assert min(found["without"]) > 20_000, "else this test shows nothing"
    assert faulting(found["within"]) <= 10
    assert found["small"]


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

def runs(function):
    found = []
    for _ in range(10):
        before = faults()
        kept = function(x)
        found.append(faults() - before)
    return found

with torch.no_grad():
    compiled = torch.compile(model, backend="{backend}")
    right = torch.allclose(compiled(x), model(x), atol=1e-4)
    harness.hand_back(without=runs(model), within=runs(compiled), right=right)
""")
    assert found["right"]
    assert min(found["without"]) > 20_000, "else this test shows nothing"
    assert faulting(found["within"]) <= 3


def test_it_goes_without_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Reserve()
    reserve.grow(40 << 20)
    begun = Reserve.__new__(Reserve)  # whose __init__ was interrupted
    monkeypatch.setattr(reserve_module, "sys", None)  # as at the end of the interpreter
    errors: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", errors.append)
    del reserve, begun
    assert errors == []
