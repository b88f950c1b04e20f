"""Programs that fork after they have used a backend: the child goes on, and never waits for ever.

A forked child has one thread, and eager itself hangs there where the parent's OpenMP had several;
`DataLoader` sets one thread in its workers, and so do these children.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backend_checks import usable
from tests.bench.programs import ROOT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")

START = """
import faulthandler, logging, os, sys, threading, time, traceback, warnings
warnings.filterwarnings("ignore")
import torch
from torch import nn
import dynamo_backends
from dynamo_backends._torch_private import forks
from dynamo_backends.interface.errors import ForkedProcessError

BACKENDS = sys.argv[2:]
LIMIT_S = 120
torch.set_grad_enabled(False)
torch.manual_seed(0)

def net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()

def right(compiled, model, x):
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)

failed = []

def in_child(name, *cases):
    "Runs functions in a forked child; one that raises ForkedProcessError is right, too."
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        torch.set_num_threads(1)
        try:
            for case in cases:
                try:
                    case()
                except ForkedProcessError:
                    pass
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        failed.append(name)
"""

USED = """
x = torch.randn(64, 16)

class Used:
    def __init__(self, backend):
        self.backend, self.model = backend, net()
        self.compiled = torch.compile(self.model, backend=backend)
        right(self.compiled, self.model, x)
    def same(self):
        right(self.compiled, self.model, x)
    def shape(self):
        for rows in (33, 65):
            right(self.compiled, self.model, torch.randn(rows, 16))
    def new(self):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
        right(torch.compile(model, backend=self.backend), model, torch.randn(2, 3, 8, 8))
    def training(self):
        with torch.enable_grad():
            model = net()
            torch.compile(model, backend=self.backend)(x).sum().backward()
            found = model[0].weight.grad.clone()
            model.zero_grad()
            model(x).sum().backward()
            torch.testing.assert_close(found, model[0].weight.grad, rtol=1e-4, atol=1e-5)

used = [Used(backend) for backend in BACKENDS]
for each in used:
    in_child(each.backend, each.same, each.shape, each.new, each.training, each.same)
    each.same()
assert not failed, failed
"""

LOADED = """
STEPS = [name for name in BACKENDS if name in ("openxla", "inductor_freezing")]
x = torch.randn(64, 16)
for backend in BACKENDS:
    model = net()
    path = os.path.join(sys.argv[1], backend)
    dynamo_backends.save(model, path, (x,), backend=backend)
    loaded = dynamo_backends.load(path)
    right(loaded, model, x)

    def call(): right(loaded, model, x)
    def again(): right(dynamo_backends.load(path), model, x)
    in_child(f"a package of {backend}", call, again)

for backend in STEPS:
    model = net()
    with torch.enable_grad():
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        def train(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()
        step = dynamo_backends.compile_step(
            train, model=model, optimizer=optimizer, backend=backend.removesuffix("_freezing")
        )
        step(x)
        in_child(f"a step of {backend}", lambda: step(x), lambda: model(x), lambda: step(x))
        step(x)
assert not failed, failed
"""

LOCKS = """
x = torch.randn(64, 16)
for backend in BACKENDS:
    model = net()
    right(torch.compile(model, backend=backend), model, x)
    model = net()
    # Compiled beside the calls while the process forks.
    later = torch.compile(model, backend=backend, options={"while_compiling": "eager"})
    for _ in range(3):
        right(later, model, x)
        in_child(f"while {backend} compiles", lambda: right(later, model, x))
        time.sleep(0.2)

held, over = threading.Event(), threading.Event()

def hold():
    "A thread that is in the middle of everything."
    for lock in list(forks._locks):
        lock.acquire()
    held.set()
    over.wait()
    for lock in list(forks._locks):
        lock.release()

thread = threading.Thread(target=hold, daemon=True)
from dynamo_backends.pipeline import background
assert background.wait_until_idle(LIMIT_S)
thread.start()
held.wait()

def new():
    for backend in BACKENDS:
        model = net()
        right(torch.compile(model, backend=backend), model, x)

in_child("all locks are held", new)
over.set()
thread.join()
assert not failed, failed
"""


def run(code: str, folder: Path, *backends: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START + code, str(folder), *map(usable, backends)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DYNAMO_BACKENDS_CHECK": "0"},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(
    "backends",
    [
        ("openxla", "onnxrt", "ov"),
        pytest.param(("tvm", "iree"), marks=pytest.mark.long),
        pytest.param(("inductor_freezing",), marks=pytest.mark.long),
        pytest.param(("ts_trace", "static_runtime", "onednn_graph", "ltc"), marks=pytest.mark.long),
    ],
    ids=lambda names: names[0],
)
def test_a_child_goes_on(backends: tuple[str, ...], tmp_path: Path):
    run(USED + LOADED + LOCKS, tmp_path, *backends)
