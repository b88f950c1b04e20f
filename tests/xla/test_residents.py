"""Tensors that live on a device: to the user as eager's, and not moved to and fro."""

import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dynamo_backends.interface.errors import DeviceError, OptionError
from dynamo_backends.runtime.device_tensor import DeviceTensor, device_value_of
from dynamo_backends.xla import to_device
from dynamo_backends.xla.options import XlaOptions
from tests.doubles.remote import (
    RemoteArray,
    RemoteDouble,
    UnannouncedReadError,
)

OPTIONS = {"fallback": "error"}


def compiled(function: Callable[..., object], **options: object) -> Callable[..., object]:
    """A function compiled by openxla, all of it."""
    return torch.compile(function, backend="openxla", options={**OPTIONS, **options})


def there(tensor: Tensor) -> DeviceTensor:
    """A copy on the double."""
    moved = to_device(tensor, "remote")
    assert isinstance(moved, DeviceTensor)
    return moved


def test_reads_past_a_transfer_are_errors(device: RemoteDouble):
    array = device.upload(torch.ones(3))
    for read in (np.asarray, float, np.from_dlpack, list):
        with pytest.raises((UnannouncedReadError, TypeError)):
            read(array)
    with pytest.raises(UnannouncedReadError):
        array.unsafe_buffer_pointer()


def test_transfers_of_ordinary_tensors_are_counted(device: RemoteDouble):
    run = compiled(lambda x, w: x @ w, device="remote")
    x, w = torch.randn(2, 3), torch.randn(3, 4)
    run(x, w)
    with device.traffic.counted() as traffic:
        result = run(x, w)
    assert sorted(traffic.uploads) == [(2, 3), (3, 4)]
    assert not traffic.downloads
    torch.testing.assert_close(result, x @ w)


def test_what_a_graph_returns_feeds_the_next_without_the_host(device: RemoteDouble):
    first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).eval()
    second = nn.Linear(4, 8).eval()
    x = torch.randn(3, 8)
    with torch.no_grad():
        expected = x
        for _ in range(100):
            expected = second(first(expected))
        a, b = compiled(to_device(first, "remote")), compiled(to_device(second, "remote"))
        b(a(there(x)))
        with device.traffic.counted() as traffic:
            result = to_device(x, "remote")
            for _ in range(100):
                result = b(a(result))
            values = result.tolist()
    assert traffic.uploads == [(3, 8)]
    assert traffic.downloads == [(3, 8)]
    torch.testing.assert_close(torch.tensor(values), expected)


def test_weights_go_up_once_and_again_when_they_changed(device: RemoteDouble):
    model = to_device(nn.Linear(4, 4).eval(), "remote")
    run = compiled(model)
    x = there(torch.randn(2, 4))
    with torch.no_grad():
        run(x)
        with device.traffic.counted() as traffic:
            model.weight.mul_(2)
            result = run(x)
        assert not traffic.uploads
        assert not traffic.downloads
        torch.testing.assert_close(result, model(x))
        model.weight.numpy()[:] = 3
        with device.traffic.counted() as traffic:
            result = run(x)
            run(x)
        assert traffic.uploads == [(4, 4)]
        torch.testing.assert_close(result, model(x))


def test_two_models_with_the_same_code_are_told_apart(device: RemoteDouble):
    models = [to_device(nn.Linear(3, 3).eval(), "remote") for _ in range(2)]
    x = there(torch.randn(2, 3))
    run = compiled(lambda model, x: model(x))
    with torch.no_grad():
        for _ in range(2):
            for model in models:
                torch.testing.assert_close(run(model, x), model(x))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda t: t[1:, ::2],
    "transposed": lambda t: t.T,
    "select": lambda t: t[2],
    "expanded": lambda t: t[0].expand(3, -1),
    "diagonal": lambda t: t.diagonal(),
    "flat": lambda t: t.view(-1)[3:17],
    "element": lambda t: t[1, 1],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_of_results_are_read_on_the_device(device: RemoteDouble, view):
    double = compiled(lambda t: t * 2)
    x = torch.randn(4, 5)
    base = double(there(x))
    double(view(base))
    with device.traffic.counted() as traffic:
        result = double(view(base))
    assert not traffic.uploads
    assert not traffic.downloads
    assert result.shape == view(x).shape
    torch.testing.assert_close(result, view(x) * 4)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_edits_in_place_are_seen_through_all_views_and_by_graphs(device: RemoteDouble, view):
    if view is VIEWS["expanded"]:
        pytest.skip("torch refuses to write to expanded tensors")
    double = compiled(lambda t: t * 2)
    x = torch.randn(4, 5)
    eager, resident = x * 2, double(there(x))
    double(resident)
    for t in (eager, resident):
        before = view(t)
        view(t).add_(1).mul_(3)
        t[0, 0] = 9
        assert torch.equal(before, view(t))
    torch.testing.assert_close(resident, eager)
    torch.testing.assert_close(double(resident), eager * 2)


def test_what_a_graph_updates_in_place_stays_on_the_device(device: RemoteDouble):
    def count(x: Tensor, total: Tensor) -> Tensor:
        total.add_(x.sum(0))
        return x * total

    run = compiled(count)
    x, total = torch.randn(3, 4), torch.zeros(4)
    resident, result = there(total), None
    for turn in range(3):
        expected = count(x, total)
        with device.traffic.counted() as traffic:
            result = run(there(x), resident)
        assert turn == 0 or (traffic.uploads == [(3, 4)] and not traffic.downloads)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(resident, total)
    plain = torch.zeros(4)
    run(there(x), plain)
    torch.testing.assert_close(plain, x.sum(0))


def test_writes_through_numpy_are_seen_for_as_long_as_the_array_lives(device: RemoteDouble):
    double = compiled(lambda t: t * 2)
    resident = there(torch.ones(3))
    double(resident)
    array = resident.numpy()
    for value in (5.0, 6.0):
        array[0] = value
        assert double(resident).tolist() == [2 * value, 2.0, 2.0]
    part = array[1:]
    del array
    part[0] = 7.0
    assert double(resident).tolist() == [12.0, 14.0, 2.0]
    del part
    double(resident)
    with device.traffic.counted() as traffic:
        double(resident)
    assert not traffic.uploads


def test_reads(device: RemoteDouble):
    plain = torch.randn(2, 3)
    resident = compiled(lambda t: t + 1)(there(plain))
    expected = plain + 1
    assert repr(resident) == repr(expected)
    assert resident.tolist() == expected.tolist()
    assert resident[0, 1].item() == expected[0, 1].item()
    assert bool(resident.sum() > 0) == bool(expected.sum() > 0)
    assert f"{resident[0, 0]:.3f}" == f"{expected[0, 0]:.3f}"
    assert np.array_equal(np.asarray(resident), expected.numpy())
    assert torch.equal(torch.from_dlpack(resident), expected)
    assert (resident.shape, resident.dtype, resident.device) == (
        expected.shape, expected.dtype, expected.device,
    )  # fmt: skip
    assert torch.equal(resident + plain, expected + plain)
    assert repr(nn.Parameter(resident)) == repr(nn.Parameter(expected))


def test_saved_tensors_load_where_there_is_no_device(device: RemoteDouble):
    resident = compiled(lambda t: t + 1)(there(torch.zeros(4)))
    buffer = io.BytesIO()
    torch.save({"whole": resident, "part": resident[1:], "p": nn.Parameter(resident)}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert {k: type(v) for k, v in loaded.items()} == {
        "whole": Tensor, "part": Tensor, "p": nn.Parameter,
    }  # fmt: skip
    loaded["part"].zero_()
    assert loaded["whole"].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert torch.equal(pickle.loads(pickle.dumps(resident)), torch.ones(4))


def test_state_dicts_go_both_ways(device: RemoteDouble):
    model = to_device(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval(), "remote")
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    x = torch.randn(5, 3)
    run = compiled(model)
    with torch.no_grad():
        run(x)
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(run(x), other(x))
        model[0].weight.add_(1)
        other.load_state_dict(model.state_dict())
        assert type(other[0].weight) is nn.Parameter
        torch.testing.assert_close(run(x), other(x))


def test_deep_copies_are_independent_and_keep_shared_memory(device: RemoteDouble):
    whole = compiled(lambda t: t + 1)(there(torch.zeros(4)))
    with device.traffic.counted() as traffic:
        first, second = copy.deepcopy((whole, whole[:2]))
    assert not traffic.downloads
    second.add_(5)
    assert first.tolist() == [6.0, 6.0, 1.0, 1.0]
    assert whole.tolist() == [1.0, 1.0, 1.0, 1.0]
    model = to_device(nn.Linear(2, 2), "remote")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.weight.zero_()
    assert isinstance(twin.weight, nn.Parameter)
    assert twin.weight.requires_grad
    assert model.weight.abs().sum() > 0


@pytest.mark.long
def test_data_of_a_parameter_can_be_set(device: RemoteDouble):
    model = to_device(nn.Linear(2, 2, bias=False).eval(), "remote")
    run = compiled(model)
    x = torch.randn(3, 2)
    with torch.no_grad():
        run(x)
        for value in (torch.eye(2), there(2 * torch.eye(2))):
            model.weight.data = value
            torch.testing.assert_close(run(x), x @ value)
            torch.testing.assert_close(model(x), x @ value)


def test_workers_of_a_data_loader_may_hold_such_tensors(device: RemoteDouble):
    data = torch.arange(8.0)
    resident = there(data)
    batches = list(DataLoader(TensorDataset(resident), batch_size=2, num_workers=1))
    assert torch.equal(torch.cat([batch for (batch,) in batches]), data)


@pytest.mark.long
def test_a_copy_in_a_compiled_graph_with_changing_sizes(device: RemoteDouble):
    run = compiled(lambda t: t * 2 + t.shape[0])
    for n in (3, 5, 7):
        x = torch.randn(n, 2)
        torch.testing.assert_close(run(there(x)), x * 2 + n)


def test_other_backends_get_contents_on_the_host(device: RemoteDouble):
    x = torch.randn(3)
    made = compiled(lambda t: t + 1)(there(x))
    run = torch.compile(lambda t: t * 3, backend="openxla", options={"device": "cpu"})
    torch.testing.assert_close(run(made), (x + 1) * 3)


def test_other_compilers_refuse_what_they_would_misread(device: RemoteDouble):
    made = compiled(lambda t: t + 1)(there(torch.randn(3)))
    run = torch.compile(lambda t: t * 3, backend="aot_eager")
    with pytest.raises(Exception, match="tensors on remote:0 were passed to a graph of a backend"):
        run(made)


def test_a_model_on_a_device_can_be_compiled_for_the_cpu(device: RemoteDouble):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(3, 8)
    expected = model(x)
    gradients = torch.autograd.grad(expected.sum(), list(model.parameters()))
    run = compiled(to_device(model, "remote"), device="cpu")
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(run(x).cpu(), expected)
    for _ in range(2):
        found = torch.autograd.grad(run(x).sum(), list(model.parameters()))
        for mine, theirs in zip(found, gradients, strict=True):
            torch.testing.assert_close(mine.cpu(), theirs)


def test_numbers_that_are_equal_but_not_the_same(device: RemoteDouble):
    x = there(torch.ones(3))
    for number in (0.0, -0.0, 0.0):
        assert torch.signbit((x * number).cpu()).tolist() == [str(number) == "-0.0"] * 3
        filled = torch.full_like(x, number)
        assert torch.signbit(filled.cpu()).tolist() == [str(number) == "-0.0"] * 3


def test_failures_surface_where_contents_are_read(device: RemoteDouble):
    run = compiled(lambda t: t + 1)
    run(there(torch.zeros(4)))
    resident = run(there(torch.zeros(4)))
    value = device_value_of(resident)
    value.array = RemoteArray(Future(), (4,))
    value.array._source.set_exception(RuntimeError("out of coffee"))
    text = r"a graph of 1 operators \(inference\) failed on remote:0: out of coffee"
    with pytest.raises(DeviceError, match=text):
        resident.tolist()


def test_unknown_devices_are_refused():
    with pytest.raises(DeviceError, match=r"to_device supports 'cpu', 'tpu'.*not 'gpu'"):
        to_device(torch.ones(1), "gpu")
    text = "option 'device' of openxla must be one of 'auto', 'cpu'"
    with pytest.raises(OptionError, match=text):
        XlaOptions.parse({"device": "gpu"}, "openxla")


def test_a_model_comes_back(device: RemoteDouble):
    model = nn.Linear(2, 2)
    weight, before = model.weight, model.weight.detach().clone()
    to_device(model, "remote")
    assert model.weight is weight
    assert isinstance(weight, DeviceTensor)
    to_device(model, "cpu")
    assert type(weight) is nn.Parameter
    assert torch.equal(weight, before)


def _writes_rows(cache: Tensor, x: Tensor, at: Tensor) -> Tensor:
    cache.index_copy_(1, at, x)
    return cache.sum(0) * 2


def _writes_all(cache: Tensor, x: Tensor, at: Tensor) -> Tensor:
    cache.mul_(2).add_(x.sum() + at)
    return cache + 1


@pytest.mark.parametrize("function", [_writes_rows, _writes_all])
@pytest.mark.parametrize("moved", ["", "cache", "x at", "cache x at"])
def test_updates_of_inputs_wherever_they_are(
    device: RemoteDouble, function: Callable[..., Tensor], moved: str
):
    run = compiled(function, device="remote")
    cache = torch.randn(2, 4, 3)
    held = there(cache) if "cache" in moved else cache.clone()
    with torch.no_grad():
        for k in range(3):
            given = x, at = torch.randn(2, 1, 3), torch.tensor([k])
            expected = function(cache, x, at)
            result = run(held, *(map(there, given) if "x at" in moved else given))
            torch.testing.assert_close(torch.as_tensor(result.tolist()), expected)
            torch.testing.assert_close(torch.as_tensor(held.tolist()), cache)
