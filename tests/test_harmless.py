"""Importing the package changes nothing; threads and worker processes get along with it."""

import json

import torch
from torch import nn

import dynamo_backends
from tests.backend_checks import threads_agree
from tests.test_autoload import run

SNAPSHOT = """
import json, os, sys, threading
import numpy, torch, torch._dynamo, torch._functorch.config, torch._inductor.config
{before}

def settings(config):
    return {{k: repr(v) for k, v in config.get_config_copy().items()}}

def snapshot():
    state = {{
        "environment": dict(os.environ),
        "dynamo": settings(torch._dynamo.config),
        "functorch": settings(torch._functorch.config),
        "inductor": settings(torch._inductor.config),
        "threads": len(os.listdir("/proc/self/task")),
        "torch threads": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "random": torch.get_rng_state().sum().item(),
        "random in numpy": repr(numpy.random.get_state()),
    }}
    if "jax" in sys.modules:
        import jax
        state["jax"] = {{k: repr(v) for k, v in jax.config.values.items()}}
    return state

before = snapshot()
{action}
after = snapshot()
print(json.dumps([k for k in before if before[k] != after[k]]))
"""

CHANGE = """
torch.set_num_threads(3)
numpy.random.rand()
os.environ["A"] = "1"
torch._dynamo.config.verbose = True
threading.Thread(target=threading.Event().wait, daemon=True).start()
before, after = after, snapshot()
print(json.dumps([k for k in before if before[k] != after[k]]))
"""

IMPORT = """
import dynamo_backends, dynamo_backends.pipeline.captured, dynamo_backends.cli
for name in dynamo_backends.__all__:
    getattr(dynamo_backends, name)
dynamo_backends.list_backends()
"""
IMPORT_XLA = "import dynamo_backends.xla.backend"
USE = """
import dynamo_backends
dynamo_backends.compiler("openxla")
torch.compile(lambda x: x.sin() + 1, backend="openxla")(torch.ones(3))
"""


def changes(action: str, before: str = "") -> list[list[str]]:
    """What an action changes, and then what `CHANGE` does, to show that the check can fail."""
    printed = run(SNAPSHOT.format(before=before, action=action) + CHANGE)
    return [json.loads(line) for line in printed.splitlines()[-2:]]


SEEN = ["environment", "dynamo", "threads", "torch threads", "random in numpy"]


def test_importing_changes_no_setting_and_starts_no_thread():
    assert changes(IMPORT + IMPORT_XLA) == [[], SEEN]


def test_compiling_changes_no_setting():
    # XLA's own threads are started on first use, not before.
    assert changes(USE, before="import jax") == [["threads"], SEEN]


def test_importing_jax_leaves_the_random_state_of_numpy():
    (difference, _) = changes(USE)
    assert "random in numpy" not in difference


def test_eight_threads_at_once():
    module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).eval()
    compiled = torch.compile(module, backend=dynamo_backends.compiler("openxla"))
    with torch.no_grad():
        compiled(torch.randn(5, 32))
    threads_agree(compiled, module, 5, 32)


FORKS = """
import os, warnings
warnings.filterwarnings("ignore", message="os.fork")
import torch
from torch.utils.data import DataLoader

class Data(torch.utils.data.Dataset):
    def __len__(self): return 16
    def __getitem__(self, i): return torch.full((4,), float(i))

if __name__ == "__main__":
    model = torch.nn.Linear(4, 1).eval()
    compiled = torch.compile(model, backend="openxla")
    with torch.no_grad():
        compiled(torch.ones(4, 4))
        for batch in DataLoader(Data(), batch_size=4, num_workers=2):
            assert torch.allclose(compiled(batch), model(batch), atol=1e-5)
        pid = os.fork()
        if pid == 0:
            right = torch.allclose(compiled(batch), model(batch), atol=1e-5)
            os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    print("done")
"""


def test_a_data_loader_with_workers_and_a_forked_child_that_runs_in_eager_instead_of_hanging():
    assert "done" in run(FORKS)
