"""A new process: no model class, no compiler, no captures, no compilations, the same results."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dynamo_backends
from dynamo_backends.bench.torchvision_shim import import_torchvision, import_transformers
from tests.bench.programs import ROOT

CHILD = """
import json, os, shutil, sys
assert all(shutil.which(name) is None for name in ("gcc", "cc", "g++", "c++", "clang"))
import torch, dynamo_backends
from dynamo_backends.interface.registry import get_backend
from safetensors.torch import load_file, save_file

path, backend = sys.argv[1:]
def refuse(self, graph, options):
    raise AssertionError("something is compiled")
type(get_backend(backend)).compile = refuse
module = dynamo_backends.load(path, strict=True)
given = load_file(path + ".inputs")
results = module(*[given[k] for k in given if k.isdigit()],
                 **{k: given[k] for k in given if not k.isdigit()})
assert "torch._dynamo" not in sys.modules  # which takes a second
leaves = torch.utils._pytree.tree_leaves(results)
save_file({str(i): x for i, x in enumerate(leaves)}, path + ".results")
counts = dynamo_backends.counters()
import torch._dynamo.utils
captures = {k: dict(v) for k, v in torch._dynamo.utils.counters.items() if v}
print(json.dumps({"counts": counts, "captures": captures,
                  "modules": [m for m in ("torchvision", "transformers") if m in sys.modules]}))
"""


def resnet() -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    model = import_torchvision().models.resnet18(num_classes=10).eval()
    return model, (torch.rand(1, 3, 32, 32),), {}


def bert() -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    transformers = import_transformers()
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        vocab_size=50,
    )  # fmt: skip
    inputs = {
        "input_ids": torch.randint(0, 50, (2, 8)),
        "attention_mask": torch.tensor([[1] * 8, [1] * 5 + [0] * 3]),
    }
    return transformers.BertModel(config).eval(), (), inputs


@pytest.mark.parametrize(
    ("make", "backend"),
    [(resnet, "openxla"), (bert, "onnxrt"), pytest.param(bert, "ov", marks=pytest.mark.long)],
)
def test_a_new_process_answers_without_compiling(make: Any, backend: str, tmp_path: Path):
    torch.manual_seed(0)
    model, args, kwargs = make()
    path = tmp_path / "m.dbp"
    dynamo_backends.save(model, path, args, kwargs, backend=backend)
    save_file({**{str(i): x for i, x in enumerate(args)}, **kwargs}, f"{path}.inputs")
    variables = {
        **os.environ, "PATH": str(tmp_path), "DYNAMO_BACKENDS_CACHE": str(tmp_path / "none"),
        "OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), backend],
        env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said["captures"] == {}
    assert said["modules"] == []
    counts = said["counts"]
    assert counts["executables"] == counts["cache_hits"] == 1
    assert not any(counts[k] for k in ("uncompiled", "failed", "wrong", "eager_calls"))
    here = dynamo_backends.load(path)(*args, **kwargs)
    there = load_file(f"{path}.results")
    for i, expected in enumerate(torch.utils._pytree.tree_leaves(here)):
        assert torch.equal(there[str(i)], expected)
