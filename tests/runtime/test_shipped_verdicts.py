"""The tables of verdicts that come with the package: when they are used, and whether right."""

import importlib
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.onnx import exporter_lowerings
from dynamo_backends.ort import trial
from dynamo_backends.runtime import cpu_info, shipped_verdicts, verdicts
from dynamo_backends.runtime.shipped_verdicts import (
    TrialVerdict,
    VerdictConditions,
    format_verdict_table,
    read_verdict_table,
    write_verdict_table,
)
from dynamo_backends.runtime.verdicts import VerdictStore

FOUND = {
    "Settings(a=(1, 2)) add.Tensor(x)": TrialVerdict(),
    "Settings(a=(1, 2)) sin.default(x) large": TrialVerdict(decomposed=True),
    "Settings(a=(1, 2)) cos.default(x)": TrialVerdict("it is wrong"),
}
ADD = "Settings(a=(1, 2)) add.Tensor(x)"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(shipped_verdicts, "FOLDER", tmp_path / "shipped")
    read_verdict_table.cache_clear()
    yield tmp_path / "shipped"
    read_verdict_table.cache_clear()


def tried() -> TrialVerdict:
    return TrialVerdict("a trial was made")


def test_a_table_answers_where_it_holds(folder: Path):
    write_verdict_table("onnxrt", VerdictStore("onnxrt", ("ort",)).current_conditions(), FOUND)
    known = VerdictStore("onnxrt", ("ort",))
    for keep in (True, False):
        assert {kind: known(kind, tried, keep) for kind in FOUND} == FOUND
    assert known("Settings(a=(1, 2)) tan.default(x)", tried, True) == tried()
    assert known("Settings(a=(1, 3)) add.Tensor(x)", tried, True) == tried()
    assert not (
        set(FOUND) & set(known.known_verdicts)
    )  # what is shipped is not written to disk again
    assert VerdictStore("onnxrt", ("ort",), shipped=False)(ADD, tried, False) == tried()


def test_a_table_is_the_same_text_whatever_the_order(folder: Path):
    here = VerdictStore("onnxrt", ()).current_conditions()
    text = write_verdict_table("onnxrt", here, FOUND).read_text()
    assert write_verdict_table("onnxrt", here, dict(reversed(FOUND.items()))).read_text() == text
    assert read_verdict_table("onnxrt", here.processor) == (here, FOUND)
    assert '"add.Tensor(x)"\n' in text


def test_each_class_of_processors_has_a_table(folder: Path, monkeypatch: pytest.MonkeyPatch):
    here = VerdictStore("onnxrt", ()).current_conditions()
    write_verdict_table("onnxrt", here, FOUND)
    write_verdict_table(
        "onnxrt", replace(here, processor="x86_64 other"), {ADD: TrialVerdict("it is wrong")}
    )
    assert {path.stem for path in (folder / "onnxrt").glob("*")} == {
        here.processor.replace(" ", "-"), "x86_64-other",
    }  # fmt: skip
    assert VerdictStore("onnxrt", ())(ADD, tried, False) == TrialVerdict()
    monkeypatch.setattr(verdicts, "cpu_isa_level", lambda: "x86_64 other")
    assert VerdictStore("onnxrt", ())(ADD, tried, False) == TrialVerdict("it is wrong")


def test_a_class_without_a_table_makes_trials(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    write_verdict_table("onnxrt", VerdictStore("onnxrt", ()).current_conditions(), FOUND)
    monkeypatch.setattr(verdicts, "cpu_isa_level", lambda: "x86_64 other")
    with caplog.at_level(logging.INFO, "dynamo_backends"):
        assert VerdictStore("onnxrt", ())(ADD, tried, False) == tried()
    assert "there are no prebuilt operator trial results for onnxrt on x86_64 other" in caplog.text


OTHER: list[dict[str, Any]] = [
    {"sources": "other"},
    {"torch": "2.99"},
    {"packages": {"onnxruntime": "0.1"}},
]


@pytest.mark.parametrize("other", OTHER, ids=lambda other: next(iter(other)))
def test_a_table_for_something_else_is_not_used(
    other: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture
):
    write_verdict_table(
        "onnxrt", replace(VerdictStore("onnxrt", ()).current_conditions(), **other), FOUND
    )
    with caplog.at_level(logging.INFO, "dynamo_backends"):
        assert VerdictStore("onnxrt", ())(ADD, tried, False) == tried()
    (name,) = other
    assert (
        f"the prebuilt operator trial results for onnxrt are not used, because these differ: {name}"
        in caplog.text
    )


def test_a_processor_of_no_known_class_uses_none(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verdicts, "cpu_isa_level", lambda: "")
    write_verdict_table("onnxrt", VerdictStore("onnxrt", ()).current_conditions(), FOUND)
    assert VerdictStore("onnxrt", ())(ADD, tried, False) == tried()


@pytest.mark.parametrize("damage", ["cut", "list", "field", "empty"])
def test_a_damaged_table_is_ignored_and_said_to_be(
    damage: str, folder: Path, caplog: pytest.LogCaptureFixture
):
    path = write_verdict_table("onnxrt", VerdictStore("onnxrt", ()).current_conditions(), FOUND)
    table = json.loads(path.read_text())
    texts = {
        "cut": path.read_text()[:-30],
        "list": "[]",
        "field": json.dumps({**table, "holds_for": {"torch": "2.13"}}),
        "empty": "",
    }
    path.write_text(texts[damage])
    read_verdict_table.cache_clear()
    assert VerdictStore("onnxrt", ())(ADD, tried, False) == tried()
    assert f"{path} is damaged and is not used" in caplog.text


def test_the_digest_is_that_of_what_decides(monkeypatch: pytest.MonkeyPatch):
    """And of nothing else, so that a change elsewhere costs nobody trials."""
    asked: list[tuple[tuple[str, ...], tuple[str, ...]]] = []

    def digest(*parts: str, without: tuple[str, ...]) -> str:
        asked.append((parts, without))
        return "digest"

    monkeypatch.setattr(verdicts, "source_digest", digest)
    VerdictStore("onnxrt", ("onnx", "ort")).current_conditions()
    package = Path(verdicts.__file__).parents[1]
    ((parts, without),) = asked
    vendors = (package / "ort", package / "openvino")
    assert all(any((folder / name).is_file() for folder in vendors) for name in without)
    assert "trial.py" not in without
    verify = {f"verify/{name}" for name in ("trials", "mismatch.py", "reference.py")}
    assert {"onnx", "ort", *verify} <= set(parts)
    assert not {"pipeline", "runtime", "graph"} & set(parts)
    assert all((package / part).exists() for part in parts)


def test_processors_are_told_apart_by_what_kernels_are_chosen_by(monkeypatch: pytest.MonkeyPatch):
    avx512 = "avx2 fma avx512f avx512bw avx512dq avx512vl"
    levels = {
        "sse4_2": "",
        "avx2 fma": "avx2",
        avx512: "avx512_core",
        f"{avx512} avx512_vnni avx_vnni": "avx512_core_vnni",
        f"{avx512} avx512_vnni avx512_bf16": "avx512_core_bf16",
        f"{avx512} avx512_bf16 avx512_fp16 amx_tile amx_int8 amx_bf16": "avx512_core_amx",
    }
    for flags, level in levels.items():
        monkeypatch.setattr(cpu_info, "_flags", lambda flags=flags: f"flags : {flags}\n")
        found = cpu_info.cpu_isa_level.__wrapped__()
        assert found.partition(" ")[2] == level


@pytest.mark.plants_errors
def test_a_wrong_kernel_is_found_although_a_table_calls_it_right(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    x, cos = torch.randn(40), torch.ops.aten.cos.default
    first = VerdictStore("onnxrt", ("ort",), shipped=False)
    monkeypatch.setattr(trial, "_verdicts", first)
    torch.compile(lambda x: x.cos(), backend="onnxrt", options={"cache": False})(x)
    assert set(first.known_verdicts.values()) == {TrialVerdict()}
    write_verdict_table("onnxrt", first.current_conditions(), first.known_verdicts)

    torch._dynamo.reset()
    (meta,) = exporter_lowerings.exporter_registry().get_decomps(cos)
    (other,) = exporter_lowerings.exporter_registry().get_decomps(torch.ops.aten.sin.default)
    monkeypatch.setattr(meta, "onnx_function", other.onnx_function)
    monkeypatch.setattr(trial, "_verdicts", VerdictStore("onnxrt", ("ort",)))
    monkeypatch.setattr(trial, "_try", lambda *_: pytest.fail("a trial was made"))
    with dynamo_backends.record() as reports:
        result = torch.compile(lambda x: x.cos(), backend="onnxrt", options={"cache": False})(x)
    torch.testing.assert_close(result, x.cos())
    assert "computed a wrong result" in caplog.text
    assert reports[0].runtime_fallbacks


class Block(nn.Module):
    """What the suites have much of: so the tables know most of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(384, 384), nn.LayerNorm(384)

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x).view(*x.shape[:2], -1, 32).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, q, q)
        y = y.transpose(1, 2).reshape(x.shape)
        return self.norm(nn.functional.gelu(x + y)).softmax(-1)


@pytest.mark.parametrize(("backend", "folder_name"), [("onnxrt", "ort"), ("ov", "openvino")])
def test_the_table_says_what_trials_say(
    backend: str, folder_name: str, monkeypatch: pytest.MonkeyPatch
):
    module = importlib.import_module(f"dynamo_backends.{folder_name}.trial")
    fresh = VerdictStore(backend, module._verdicts.sources, shipped=False)
    here = fresh.current_conditions()
    table = read_verdict_table(backend, here.processor)
    if table is None:
        pytest.skip(f"there is no table for {here.processor}")
    if (here.packages, here.torch) != (table[0].packages, table[0].torch):
        pytest.skip(f"the table is for {table[0]}, and this is {here}")
    monkeypatch.setattr(module, "_verdicts", fresh)
    with torch.no_grad():
        torch.compile(Block().eval(), backend=backend)(torch.randn(4, 40, 384))
    both = set(fresh.known_verdicts) & set(table[1])
    assert len(both) >= 6
    assert {k: fresh.known_verdicts[k] for k in both} == {k: table[1][k] for k in both}


@pytest.mark.parametrize(
    "path",
    sorted(shipped_verdicts.FOLDER.glob("*/*.json")),
    ids=lambda p: f"{p.parent.name}-{p.stem}",
)
def test_tables_are_whole_small_and_in_the_package(path: Path):
    content = json.loads(path.read_text())
    table = read_verdict_table(path.parent.name, content["holds_for"]["processor"])
    assert table is not None, "it is where it is looked for"
    assert isinstance(table[0], VerdictConditions)
    assert len(table[1]) > 300
    assert path.stat().st_size < 400_000
    assert path.read_text() == format_verdict_table(*table)
