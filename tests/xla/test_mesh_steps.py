"""Training steps on eight devices that a CPU is divided into equal those on one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from dynamo_backends import compile_step, record
from dynamo_backends.bench.torchvision_shim import import_transformers
from dynamo_backends.interface.mesh import MeshReport
from dynamo_backends.verify.comparator import describe_difference

STEPS = 10
BATCH = 16
CLASSES = 8

Rows = [Replicate(), Shard(0)]
Columns = [Replicate(), Shard(1)]


class Case:
    """A model, its batches, and how tensor parallelism splits it."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        inputs: Callable[[], Tensor],
        placements: dict[str, Any],
    ):
        self.make = make
        self.inputs = inputs
        self.placements = placements


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, CLASSES))


def images() -> nn.Module:
    """Convolutions and batch norm, without biases whose gradient is rounding alone."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, groups=2, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 2, stride=2),
        nn.Flatten(),
        nn.Linear(8 * 16, CLASSES),
    )


class Bert(nn.Module):
    """A classifier on a BERT of one layer, without the biases of keys."""

    def __init__(self) -> None:
        super().__init__()
        transformers = import_transformers()
        config = transformers.BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=16,
        )
        self.bert = transformers.BertModel(config)
        for layer in self.bert.encoder.layer:
            layer.attention.self.key.bias.requires_grad_(False)
        self.out = nn.Linear(32, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.bert(input_ids=ids).pooler_output)


CASES = {
    "mlp": Case(mlp, lambda: torch.randn(BATCH, 32), {"0.*": Rows, "3.weight": Columns}),
    "images": Case(
        images,
        lambda: torch.randn(BATCH, 3, 8, 8),
        {"0.weight": Rows, "4.weight": Rows, "9.weight": Columns},
    ),
    "bert": Case(
        Bert,
        lambda: torch.randint(64, (BATCH, 8)),
        {
            "*.intermediate.dense.*": Rows,
            "*.attention.self.*": Rows,
            "*.output.dense.weight": Columns,
        },
    ),
}


class Trained:
    """A model after ten steps, with its losses and its report."""

    def __init__(self, case: Case, dtype: torch.dtype, **settings: Any):
        torch.manual_seed(0)
        self.model = case.make().to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        torch.manual_seed(1)
        batches = [(case.inputs(), torch.randint(CLASSES, (BATCH,))) for _ in range(STEPS)]
        torch.manual_seed(2)
        with record() as reports:
            self.step = compile_step(
                self.train, model=self.model, optimizer=self.optimizer,
                **settings,
            )  # fmt: skip
            self.losses = [self.step(cast(x, dtype), y) for x, y in batches]
        self.batch = [cast(batches[0][0], dtype), batches[0][1]]
        self.report = reports[0]

    def train(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def everything(self) -> list[Tensor]:
        """Losses, parameters, buffers and state on the host."""
        state = [v for s in self.optimizer.state_dict()["state"].values() for v in s.values()]
        found = [*self.losses, *self.model.state_dict().values(), *state]
        return [torch.tensor(x.tolist(), dtype=x.dtype) for x in found]

    @property
    def mesh(self) -> MeshReport:
        assert self.report.mesh is not None
        return self.report.mesh


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def settings_of(case: Case, parallel: str) -> dict[str, Any]:
    if parallel == "tensor":
        return {"mesh": {"data": 4, "model": 2}, "placements": case.placements}
    return {"mesh": {"data": 8}, "parallel": parallel}


NAMES = ["mlp", "images", pytest.param("bert", marks=pytest.mark.long)]

_alone: dict[tuple[str, torch.dtype], Trained] = {}


def alone(name: str, dtype: torch.dtype) -> Trained:
    """Trained on one device."""
    if (name, dtype) not in _alone:
        _alone[name, dtype] = Trained(CASES[name], dtype)
    return _alone[name, dtype]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "tensor"])
@pytest.mark.parametrize("name", NAMES)
def test_ten_steps_equal_one_device(name: str, parallel: str):
    case = CASES[name]
    expected = alone(name, torch.float64)
    found = Trained(case, torch.float64, **settings_of(case, parallel))
    for a, b in zip(expected.everything(), found.everything(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)
    assert (found.step.launches, found.step.compilations) == (STEPS, 1)
    assert found.report.verified == 1
    assert not found.report.runtime_fallbacks
    exchanged = {c.kind for c in found.mesh.collectives}
    assert "all-reduce" in exchanged
    if parallel == "fsdp":  # on CPUs XLA makes an all-reduce and a slice of a reduce-scatter
        assert "all-gather" in exchanged
        whole = memory_of_arguments(expected)
        assert found.mesh.argument_bytes <= (1 / 8 + 0.05) * whole
    if parallel == "ddp":  # gradients, losses and statistics of batches; no activation
        others = [c.bytes for c in found.mesh.collectives if c.kind != "all-reduce"]
        assert sum(others) <= BATCH * 8  # indices of the labels
    if parallel == "tensor":
        placed = [p for p in found.mesh.parameters if p.placement.endswith("over model")]
        assert len(placed) >= 3


def memory_of_arguments(trained: Trained) -> int:
    """What a single device holds of parameters, buffers, state and batch, in bytes."""
    state = [v for s in trained.optimizer.state_dict()["state"].values() for v in s.values()]
    tensors = [*trained.model.state_dict().values(), *state, *trained.batch]
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.long
@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "tensor"])
@pytest.mark.parametrize("name", NAMES)
def test_ten_steps_in_float32_are_as_accurate_as_one_device(name: str, parallel: str):
    case = CASES[name]
    expected, precise = alone(name, torch.float32), alone(name, torch.float64)
    found = Trained(case, torch.float32, **settings_of(case, parallel))
    several = expected.everything(), found.everything(), precise.everything()
    assert describe_difference(*several) is None
