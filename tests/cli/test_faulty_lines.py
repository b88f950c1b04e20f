"""Faulty command lines: one message and an exit status, never a traceback."""

import json
import os
from pathlib import Path

import pytest

from dynamo_backends.cli import main

MODELS = """
import torch
from torch import nn

def good(): return nn.Linear(4, 4), (torch.ones(2, 4),)
def raising(): raise RuntimeError("no weights")
def number(): return 3
def none(): return None
def empty(): return ()
def short(): return (nn.Linear(4, 4),)
def wrong_shape(): return nn.Linear(4, 4), (torch.ones(2, 5),)
def wrong_count(): return nn.Linear(4, 4), ()
def wrong_name(): return nn.Linear(4, 4), (), {"nonsense": torch.ones(2, 4)}
def too_many(a, b): return nn.Linear(4, 4), (torch.ones(2, 4),)
def string(): return nn.Linear(4, 4), "abc"
def not_callable(): return "model", (torch.ones(2, 4),)
class Inputs(nn.Module):
    def example_inputs(self): raise KeyError("inputs")
    def forward(self, x): return x
def inputs(): return Inputs()
class Failing(nn.Module):
    def forward(self, x): raise ValueError("mine")
def failing(): return Failing(), (torch.ones(2, 4),)
models = {"good": good, "failing": failing, "raising": raising}
not_models = {"a": 3}
a_list = [good]
def raising_models(): raise OSError("no disk")
_private = good
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files of all kinds; it is the user's home, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE", str(tmp_path / "cache"))
    files: dict[str, str | bytes] = {
        "m.py": MODELS,
        "syntax.py": "def f(:\n",
        "raises.py": "1 / 0\n",
        "imports.py": "import a_package_that_is_not_there\n",
        "binary.py": b"\xff\xfe\x00\x01",
        "empty.py": "",
        "bad.json": "{",
        "deep.json": "[" * 100_000,
        "list.json": "[]",
        "number.json": "3",
        "nan.json": '{"calls": NaN}',
        "binary.json": b"\xff\xfe\x00\x01",
        "other.json": '{"kind": "something else"}',
        "run.json": '{"kind": "dynamo-backends bench", "cells": 3}',
        "no_calls.json": '{"calls": []}',
        "negative.json": '{"calls": [[[-1, 4]]]}',
        "huge.json": '{"calls": [[[1e9, 4]]]}',
        "many.json": '{"calls": [[[2, 4], [2, 4]]]}',
        "dims.json": '{"calls": [[[2, 4, 1]]]}',
        "names.json": '{"calls": [{"nonsense": [2, 4]}]}',
        "decisions.json": '{"decisions": [3]}',
        "half.json": '{"decisions": [{"key": "a"}]}',
        "not.dbp": "no package",
        "zip.dbp": b"PK\x05\x06" + bytes(18),
        "empty.dbp": b"",
    }
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (tmp_path / name).write_bytes(data)
    (tmp_path / "dir.py").mkdir()
    (tmp_path / "dir.json").mkdir()
    (tmp_path / "dir.dbp").mkdir()
    (tmp_path / "secret.json").write_text("{}")
    os.chmod(tmp_path / "secret.json", 0)
    return tmp_path


EXPLAIN = (
    *("", "resnet18", ":", "hf:", ":resnet18", "nope:resnet18", "torchvision:", "torchvision:nope"),
    *("timm:nope", "hf:nope", "hf:AutoModel", "hf:torch", "none.py:f", "dir.py:f", "syntax.py:f"),
    *("raises.py:f", "imports.py:f", "binary.py:f", "empty.py:f", "m.py:nope", "m.py:_private"),
    *("m.py:raising", "m.py:number", "m.py:none", "m.py:empty", "m.py:short", "m.py:wrong_shape"),
    *("m.py:wrong_count", "m.py:wrong_name", "m.py:too_many", "m.py:string", "m.py:not_callable"),
    *("m.py:inputs", "m.py:failing", "~nobody/m.py:good", "m.py", "m.py:", "\0.py:f", "m.py:torch"),
    "m.py:good --backend nope",
    "m.py:good --backend OpenXLA",
    "m.py:good --backend \0",
    "m.py:good --option",
    "m.py:good --option verify",
    "m.py:good --option =3",
    "m.py:good --option nope=3",
    "m.py:good --option verify=nope",
    "m.py:good --option verify=[",
    "m.py:good --option min_block_size=0",
    "m.py:good --option min_block_size=1.5",
    "m.py:good --option bucket_growth=1e999",
    "m.py:good --option bucket_growth=0.5",
    "m.py:good --option buckets={}{}",
    "m.py:good --option device=nope",
    "m.py:good --option keep_in_eager=('nope',)",
    "m.py:good --option keep_in_eager=softmax",
    "m.py:good --backend autotune --option budget_s=-1",
    "m.py:good --backend autotune --option budget_s=1e999",
    "m.py:good --backend onnxrt --option intra_op_threads=-1",
    "m.py:good --batch 0",
    "m.py:good --batch -1",
    "m.py:good --batch 1e3",
    "m.py:good --batch 99999999999999999999",
    "m.py:good --rounds 0",
    "m.py:good --traffic none.json",
    "m.py:good --traffic dir.json",
    "m.py:good --traffic bad.json",
    "m.py:good --traffic deep.json",
    "m.py:good --traffic list.json",
    "m.py:good --traffic nan.json",
    "m.py:good --traffic binary.json",
    "m.py:good --traffic no_calls.json",
    "m.py:good --traffic negative.json",
    "m.py:good --traffic huge.json",
    "m.py:good --traffic many.json",
    "m.py:good --traffic dims.json",
    "m.py:good --traffic names.json",
    "--traffic no_calls.json",
    "m.py:good --backend eager --html none/page.html",
    "m.py:good --backend eager --html dir.json",
)
BENCH = (
    *("", "nope", "clasic", "compare", "compare bad.json", "compare bad.json bad.json"),
    *("compare list.json number.json", "compare other.json run.json", "compare run.json run.json"),
    *("compare none.json none.json", "compare dir.json dir.json", "compare a b c", "page"),
    *("page none.json", "page binary.json", "page deep.json", "classic extra.json", "torchbench"),
    *("torchbench --path none", "m.py:nope", "m.py:a_list", "m.py:not_models", "m.py:number"),
    *("m.py:raising_models", "none.py:models", "syntax.py:models", "raises.py:m", "dir.py:m"),
    "m.py:models --models nope",
    "m.py:models --backends nope",
    "m.py:models --backends none.py:f",
    "m.py:models --backends ..:f",
    "m.py:models --backends nope.nope:f",
    "m.py:models --backends export:nope",
    "m.py:models --mode nope",
    "m.py:models --mode training --backends export:openvino",
    "m.py:models --dtype float8",
    "m.py:models --batch x",
    "m.py:models --device tpu",
    "m.py:models --threads 0",
    "m.py:models --rounds -3",
    "m.py:models --patience nan",
    "m.py:models --timeout inf",
    "m.py:models --timeout 0",
    "m.py:models --memory -1",
    "m.py:models --memory x",
    "m.py:models --output list.json",
    "m.py:models --output list.json --resume",
    "m.py:models --output run.json --resume",
    "m.py:models --output dir.json",
    "m.py:models --output none/b.json --models nope",
    "compare run.json run.json --threshold nan",
    "traffic --batch 3",
)
OTHERS = (
    *("", "nope", "--nope", "list extra", "doctor extra", "explain --nope"),
    *("inspect", "inspect none.dbp", "inspect dir.dbp", "inspect not.dbp", "inspect zip.dbp"),
    *("inspect empty.dbp", "inspect ~/none.dbp", "inspect ~nobody/x.dbp"),
    *("verify", "verify none.dbp", "verify dir.dbp", "verify not.dbp", "verify zip.dbp"),
    *("verify not.dbp --checkpoint none", "verify not.dbp --strict"),
    *("compile", "compile nope", "compile none.py:f", "tune none.py:f --budget 0", "tune nope"),
    *("save", "save none.py:f", "save none.py:f --train", "save none.py:f --backend nope"),
    *("cache", "cache nope", "cache show", "cache show nope", "cache show \0"),
    *("cache export", "cache export dir.json", "cache export none/x.json", "cache import"),
    *("cache import none.json", "cache import dir.json", "cache import bad.json"),
    *("cache import list.json", "cache import deep.json", "cache import binary.json"),
    *("cache import decisions.json", "cache import half.json", "cache ls --html none/x.html"),
    *(
        "conformance",
        "conformance nope",
        "conformance none.py:f",
        "conformance eager --groups nope",
    ),
    *("conformance eager --dtype nope", "conformance eager --only nope --share 0"),
    *("conformance eager --rewrites 0", "conformance eager --rewrites 1 --seed -1"),
    *("conformance eager --time-limit nan", "conformance eager --processes 0"),
    *("conformance eager --groups operators --only nope --output list.json",),
)
LINES = [
    *(f"explain {line}" for line in EXPLAIN),
    *(f"bench {line}" for line in BENCH),
    *OTHERS,
]


def test_there_are_enough():
    assert len(set(LINES)) == len(LINES) >= 75


def outcome(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What is wrong with what a line does; empty: nothing."""
    try:
        status = main([word for word in line.split(" ") if word])
    except SystemExit as ended:  # argparse's own errors
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:
        capsys.readouterr()
        return f"raises {type(error).__name__}: {str(error)[:200]}"
    said = capsys.readouterr().err
    if status != 2:
        return f"exit status {status}"
    last = said.rstrip("\n").rpartition("\n")[2]
    if "Traceback" in said or not last.startswith("dynamo-backends"):
        return f"says {said[-200:]!r}"
    return ""


def test_no_faulty_line_ends_in_a_traceback(folder: Path, capsys: pytest.CaptureFixture[str]):
    found = {line: outcome(line, capsys) for line in LINES}
    assert {line: wrong for line, wrong in found.items() if wrong} == {}


def test_home_is_expanded(folder: Path, capsys: pytest.CaptureFixture[str]):
    line = "explain ~/m.py:good --backend eager --html ~/page.html"
    assert main(line.split()) == 0
    assert (folder / "page.html").is_file()
    assert main(["cache", "export", "~/out.json"]) == 0
    assert json.loads((folder / "out.json").read_text())["decisions"] == []
    assert main(["cache", "import", "~/out.json"]) == 0
