"""What `compile_step` says of meshes and placements that cannot be."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard

from dynamo_backends import compile_step
from dynamo_backends.aot.step.mesh.parallel import Parallel, parallel_of
from dynamo_backends.interface.errors import DeviceError, OptionError
from dynamo_backends.interface.mesh import Mesh

MESH = {"data": 4, "model": 2}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def make(model: nn.Module | None = None, **settings: Any) -> Any:
    """A step."""
    model = net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return compile_step(train, model=model, optimizer=optimizer, **settings)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"mesh": 8}, r"mesh must be a torch DeviceMesh or a dict .* not 8"),
        ({"mesh": {}}, r"mesh must have at least one dimension"),
        ({"mesh": {"data": 0}}, r"positive sizes.*it has 'data': 0"),
        ({"mesh": {"data": True}}, r"positive sizes.*it has 'data': True"),
        ({"mesh": {3: 2}}, r"positive sizes.*it has 3: 2"),
        ({"mesh": MESH, "parallel": "zero"}, r"parallel must be 'ddp' or 'fsdp', not 'zero'"),
        ({"parallel": "ddp"}, r"parallel needs a mesh"),
        ({"placements": {}}, r"placements needs a mesh"),
        ({"batch_placements": [Shard(0)]}, r"batch_placements needs a mesh"),
        ({"mesh": MESH, "fallback": "split"}, r"mesh cannot be combined with fallback=\"split\""),
        (
            {"mesh": MESH, "placements": {"0.weigth": [Replicate(), Shard(0)]}},
            r"placements names '0\.weigth', which matches no parameter\. "
            r"Did you mean '0\.weight'\?",
        ),
        (
            {"mesh": MESH, "placements": {"0.weight": [Shard(0)]}},
            r"placements\['0\.weight'\] must be one placement for each dimension of the mesh "
            r"\(data=4, model=2\), such as \[Shard\(0\), Replicate\(\)\]",
        ),
        (
            {"mesh": MESH, "placements": {"0.weight": [Replicate(), Partial()]}},
            r"placements\['0\.weight'\] has Partial\(sum\), but Partial placements are not",
        ),
        (
            {"mesh": MESH, "batch_placements": [Partial(), Replicate()]},
            r"batch_placements has Partial\(sum\), but Partial placements are not",
        ),
        (
            {"mesh": MESH, "batch_placements": ["data", None]},
            r"batch_placements has 'data'; placements are Shard\(dim\) and Replicate\(\)",
        ),
        ({"mesh": MESH, "backend": "inductor"}, r"inductor does not support mesh"),
        ({"mesh": MESH, "backend": "aot_eager"}, r"aot_eager does not support mesh"),
        ({"mesh": MESH, "options": {"device": "tpu:1"}}, r"'tpu:1', which is a single device"),
        ({"mesh": MESH, "options": {"device": "cuda"}}, r"'cpu' or 'tpu' devices, not of 'cuda'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_captured(settings: dict[str, Any], text: str):
    with pytest.raises(OptionError, match=text):
        make(**settings)


def test_other_backends_of_this_package_refuse_meshes():
    with pytest.raises(OptionError, match="onnxrt does not support mesh"):
        make(mesh=MESH, backend="onnxrt")


def test_a_mesh_of_other_devices_than_the_option_says():
    mesh = SimpleNamespace(mesh=torch.arange(2), mesh_dim_names=("data",), device_type="cuda")
    with pytest.raises(OptionError, match="but the mesh has cuda devices"):
        make(mesh=mesh, options={"device": "cpu"})


def test_a_mesh_that_has_not_one_device_of_each_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    text = (
        r"mesh \(data=4, model=2\) has 8 devices, but torch.distributed has 2 processes.*'data': 2"
    )
    with pytest.raises(OptionError, match=text):
        make(mesh=MESH)


def test_a_mesh_larger_than_the_devices(monkeypatch: pytest.MonkeyPatch):
    from dynamo_backends.xla.mesh import devices

    monkeypatch.setattr(devices, "_found", lambda platform: [object()] * 4)
    text = r"the mesh \(data=4, model=2\) needs 8 devices, .* but XLA finds 4 tpu devices here"
    with pytest.raises(DeviceError, match=text):
        make(mesh=MESH, options={"device": "tpu"})


@pytest.mark.parametrize(
    ("settings", "size", "text"),
    [
        (
            {},
            6,
            r"a tensor of the batch of shape \[6, 8\] cannot be split over the mesh \(data=4, "
            r"model=2\): Shard\(0\) over data and model needs a dimension 0 that 8 divides, not "
            r"6\. Use a batch size that is divisible \(DataLoader\(drop_last=True\)\)",
        ),
        (
            {"batch_placements": [Shard(2), Replicate()]},
            8,
            r"has 2 dimensions.*Shard\(2\) is out of range",
        ),
        (
            {"placements": {"2.*": [Replicate(), Shard(0)]}},
            8,
            r"the parameter 2\.weight of shape \[3, 16\] cannot be split .* that 2 divides, not 3\."
            r" Give '2\.\*' another placement",
        ),
        (
            {"placements": {"2.bias": [Replicate(), Shard(1)]}},
            8,
            r"the parameter 2\.bias has 1 dimensions, so Shard\(1\) is out of range",
        ),
    ],
)
def test_what_does_not_fit_is_said_with_the_first_step(
    settings: dict[str, Any], size: int, text: str
):
    step = make(mesh=MESH, **settings)
    with pytest.raises(OptionError, match=text):
        step(torch.randn(size, 8))


def placements(parallel: Parallel | None, model: nn.Module) -> dict[str, str]:
    """Where parameters are, by name."""
    assert parallel is not None
    mesh = parallel.mesh
    return {
        name: mesh.describe(parallel._of_parameter([name], p))
        for name, p in model.named_parameters()
    }


def test_fsdp_splits_what_divides_and_leaves_the_rest_whole():
    model = net()
    parallel = parallel_of({"data": 8}, "fsdp", None, None, [model])
    assert placements(parallel, model) == {
        "0.weight": "Shard(0) over data",
        "0.bias": "Shard(0) over data",
        "2.weight": "Shard(1) over data",  # of 3 by 16
        "2.bias": "Replicate",
    }


def test_batches_are_split_over_dimensions_that_split_no_named_parameter():
    model = net()
    named = {"0.weight": [Replicate(), Shard(0)]}
    parallel = parallel_of(MESH, "fsdp", named, None, [model])
    assert parallel is not None
    assert parallel.batch == (0, None)
    assert placements(parallel, model) == {
        "0.weight": "Shard(0) over model",
        "0.bias": "Shard(0) over data",
        "2.weight": "Shard(1) over data",
        "2.bias": "Replicate",
    }
    both = parallel_of(MESH, None, None, None, [model])
    assert both is not None
    assert both.batch == (0, 0)


def test_the_first_pattern_that_matches_counts():
    model = net()
    named = {"0.bias": [Replicate(), Replicate()], "*.bias": [Shard(0), Replicate()]}
    parallel = parallel_of({"data": 1, "model": 2}, "ddp", named, None, [model])
    assert placements(parallel, model)["0.bias"] == "Replicate"
    assert placements(parallel, model)["2.bias"] == "Shard(0) over data"


def test_a_dimension_may_be_split_over_several_dimensions_of_the_mesh():
    mesh = Mesh(("data", "model"), (4, 2), tuple(range(8)))
    assert mesh.shard_count((0, 0), 0) == 8
    assert mesh.shard_shape((0, 1), (8, 6)) == (2, 3)
    assert mesh.describe((0, 1)) == "Shard(0) over data, Shard(1) over model"
    assert mesh.describe((0, 0)) == "Shard(0) over data and model"


def test_processes_of_torchrun_that_do_not_know_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match=r"one of 2 torchrun processes.*init_process_group"):
        make(mesh={"data": 2})
