"""Graphs with packed weights are kept on disk by Inductor, and take those of the model at hand."""

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.inductor.checking import EXACT, check

NAMES = ("hit", "miss", "bypass")


def network(seed: int) -> nn.Module:
    """A convolution and a linear layer, for both of which oneDNN packs weights."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 49, 64)
    )


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("own_cache")
def test_the_same_graph_with_other_weights_is_loaded_and_right():
    x = torch.randn(4, 16, 16, 16)
    found = []
    for seed in (0, 1):
        torch._dynamo.reset()
        counters.clear()
        check(network(seed), x, EXACT)
        found.append({name: counters["inductor"][f"fxgraph_cache_{name}"] for name in NAMES})
    assert found == [{"hit": 0, "miss": 1, "bypass": 0}, {"hit": 1, "miss": 0, "bypass": 0}]


@pytest.mark.usefixtures("own_cache")
def test_other_sizes_of_packed_weights_are_another_graph():
    counters.clear()
    for features in (64, 48):
        torch._dynamo.reset()
        check(nn.Linear(32, features), torch.randn(8, 32), EXACT)
    assert counters["inductor"]["fxgraph_cache_hit"] == 0


@pytest.mark.usefixtures("own_cache")
def test_a_graph_for_other_vectors_is_not_loaded(monkeypatch: pytest.MonkeyPatch):
    """Its loops take so many elements at once as those have."""
    from torch._inductor import cpu_vec_isa

    counters.clear()
    check(network(0), x := torch.randn(4, 16, 16, 16), EXACT)
    torch._dynamo.reset()
    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", lambda *_: "others")
    check(network(0), x, EXACT)
    found = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in NAMES}
    assert found == {"hit": 0, "miss": 2, "bypass": 0}
    assert torch.compiler.config.cache_key_tag == ""


def packed(*sizes: int) -> int:
    """How many tensors of that shape are in a layout of oneDNN."""
    gc.collect()
    found = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    return sum(each.is_mkldnn and each.shape == sizes for each in found)


@pytest.mark.usefixtures("own_cache")
def test_packed_weights_live_as_long_as_the_compiled_model():
    """Torch's lists of modules and of classes would keep them; loaded from disk, too."""
    for _ in range(2):
        compiled = torch.compile(network(0).eval(), backend="inductor_freezing")
        with torch.no_grad():
            compiled(torch.randn(4, 16, 16, 16))
        assert packed(32, 16, 3, 3) == 1
        del compiled
        torch._dynamo.reset()
        assert packed(32, 16, 3, 3) == 0
