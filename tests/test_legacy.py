"""Old names: each resolves, or says what became of it."""

import logging
import re
import tomllib
from pathlib import Path

import pytest
import torch

import dynamo_backends
from dynamo_backends import legacy
from dynamo_backends.interface.errors import UnknownBackendError
from dynamo_backends.interface.registry import (
    OLD_NAMES,
    get_backend,
    log_legacy_name,
    third_party_backends,
)

ROOT = Path(__file__).parents[1]
ACCELERATE = ["eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs",
              "ofi", "fx2trt", "onnxrt", "tensorrt", "aot_torchxla_trace_once",
              "torchxla_trace_once", "ipex", "tvm"]  # fmt: skip


def names(owner: str) -> list[str]:
    return [o.name for o in OLD_NAMES if o.owner == owner]


def test_the_document_has_a_row_for_every_name():
    rows = re.findall(r"^\| `(\w+)` \| .+ \|$", legacy.document(), re.MULTILINE)
    assert rows == [old.name for old in OLD_NAMES]


def test_names_are_sorted_and_unique():
    given = [old.name for old in OLD_NAMES]
    assert given == sorted(set(given))


def test_every_name_that_needs_one_has_an_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project["entry-points"]["torch_dynamo_backends"]
    ours = {name for name, value in points.items() if "legacy" in value}
    expected = {n for n in legacy.entry_points() if "legacy" in points.get(n, "legacy")}
    assert ours == expected


def test_torchs_own_names_are_not_taken():
    from torch._dynamo.backends import registry

    torch._dynamo.list_backends(exclude_tags=())
    torchs = {n for n, f in registry._COMPILER_FNS.items() if f.__module__.startswith("torch.")}
    assert torchs.isdisjoint(legacy.entry_points())


def test_accelerates_names_are_all_known_to_torch():
    assert set(ACCELERATE) <= set(torch._dynamo.list_backends(exclude_tags=()))


@pytest.mark.parametrize("name", names("here"))
def test_a_name_of_a_living_backend_resolves(name: str):
    old = next(o for o in OLD_NAMES if o.name == name)
    assert get_backend(name) is get_backend(old.target)


@pytest.mark.parametrize("name", names("nobody"))
def test_a_name_without_a_backend_says_what_became_of_it(name: str):
    with pytest.raises(UnknownBackendError, match="no backend") as info:
        dynamo_backends.compiler(name)
    assert name in str(info.value)


def test_an_old_name_runs_and_says_once_what_it_is(caplog: pytest.LogCaptureFixture):
    log_legacy_name.cache_clear()
    x = torch.randn(3)
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        for _ in range(2):
            torch._dynamo.reset()
            result = torch.compile(lambda x: x.relu() * 2 + 1, backend="ltc_reuse_graph")(x)
    assert torch.equal(result, x.relu() * 2 + 1)
    said = [r.message for r in caplog.records if "ltc_reuse_graph" in r.message]
    assert said == ["'ltc_reuse_graph' is replaced by 'ltc': renamed."]


def test_an_old_name_of_torchs_backend_gets_that_one(monkeypatch: pytest.MonkeyPatch):
    from torch._dynamo.backends import registry

    monkeypatch.setitem(registry._COMPILER_FNS, "cudagraphs", lambda gm, inputs: "torch's")
    assert legacy.old_compiler("aot_cudagraphs")(None, ()) == "torch's"


def test_the_error_reaches_the_user_of_torch_compile():
    with pytest.raises(Exception, match="TASO is a finished research project"):
        torch.compile(lambda x: x + 1, backend="taso")(torch.ones(2))


def test_old_names_are_not_listed_as_other_packages_backends():
    assert set(third_party_backends()).isdisjoint(legacy.entry_points())
