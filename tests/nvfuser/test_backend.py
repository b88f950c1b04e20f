"""What torch promises beyond values, shapes that change, the cache of fusions, options."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends._torch_private import FakeTensorMode
from dynamo_backends.conformance.weights.changes import CHANGES
from dynamo_backends.interface.errors import CompileError, LoweringError
from dynamo_backends.nvfuser import program, vendor
from dynamo_backends.nvfuser.compiler import lower_graph
from dynamo_backends.nvfuser.dtypes import describe
from dynamo_backends.nvfuser.program import (
    FUSIONS,
    Constant,
    FusionProgram,
    Fusions,
    Input,
    Operation,
    Ref,
)
from dynamo_backends.nvfuser.runtime import Reader
from tests import backend_checks as checks
from tests.checking import check
from tests.refusals import graph_on


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend=dynamo_backends.compiler("nvfuser", **options))


@pytest.mark.parametrize("what", checks.SEMANTICS)
def test_semantics(nvfuser: str, what: str):
    fn, inputs = checks.SEMANTICS[what]
    with torch.no_grad():
        checks.agree("nvfuser", fn, *inputs(), min_block_size=1, fragmented="keep")


def test_weights_are_read_where_they_are(nvfuser: str):
    assert checks.never_stale("nvfuser", list(CHANGES)) >= 0


def test_gradients(nvfuser: str):
    checks.gradients_agree("nvfuser")


def test_random_numbers_equal_eagers(nvfuser: str):
    def fn(x: Tensor) -> Tensor:
        return F.dropout(x * 2, 0.5, training=True) + torch.rand_like(x)

    check(fn, torch.randn(3, 4), ops_in_eager=None, backend="nvfuser")


def test_batch_norm_in_training_updates_its_buffers(nvfuser: str):
    module, twin = (nn.BatchNorm2d(3).train() for _ in range(2))
    x = torch.randn(2, 3, 4, 4)
    with dynamo_backends.record() as reports:
        torch.testing.assert_close(compiled(module, min_block_size=1)(x), twin(x))
    assert checks.ran_on_backend(reports)
    for ours, theirs in zip(module.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


LAYOUTS = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "with gaps": lambda x: torch.cat([x, x], 3)[:, :, :, : x.shape[3]],
    "expanded": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_read_without_copies_and_results_have_eagers(nvfuser: str, layout: str):
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x * 2 + y, x.sum(1), x.permute(0, 2, 3, 1) + 1, (x + y).flatten(1), x.mean((2, 3))

    x = LAYOUTS[layout](torch.randn(2, 3, 4, 5))
    with torch.no_grad():
        reports = checks.agree("nvfuser", fn, x, torch.randn(3, 1, 1), min_block_size=1)
    assert checks.ran_on_backend(reports)


def test_results_share_no_memory_with_inputs_or_with_each_other(nvfuser: str):
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        return x.clone(), x.t().clone(), y, y.clone(), y.reshape(-1).clone(), x * 1.0

    x = torch.randn(4, 6)
    kept = x.clone()
    results = compiled(fn, min_block_size=1)(x)
    assert len({t.data_ptr() for t in (x, *results)}) == 1 + len(results)
    for result in results:
        result.add_(1)
    assert torch.equal(x, kept)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2)).eval()


def test_one_fusion_for_all_sizes_of_a_batch(nvfuser: str):
    checks.follows_the_batch("nvfuser")
    assert (FUSIONS.made, FUSIONS.found) == (1, 2)


def attend(x: Tensor) -> Tensor:
    """Four heads: sizes that are merged, split and read off other tensors."""
    batch, length, width = x.shape
    q = x.view(batch, length, 4, width // 4).transpose(1, 2)
    weights = (q @ q.mT * 0.5).softmax(-1)
    return (weights @ q).transpose(1, 2).reshape(batch * length, width).mean(0) + 1


def test_sizes_of_views_are_read_off_the_inputs(nvfuser: str):
    """Sizes that equal each other by chance would only lead to another fusion."""
    function = torch.compile(attend, backend=dynamo_backends.compiler("nvfuser"), dynamic=True)
    for batch, length in ((3, 5), (7, 6), (9, 11)):
        x = torch.randn(batch, length, 8)
        torch.testing.assert_close(function(x), attend(x))
    assert (FUSIONS.made, FUSIONS.found) == (1, 2)


def test_sizes_can_be_numbers(nvfuser: str):
    backend = dynamo_backends.compiler("nvfuser", symbolic_sizes=False)
    function = torch.compile(attend, backend=backend, dynamic=True)
    for batch in (2, 5):
        x = torch.randn(batch, 3, 8)
        torch.testing.assert_close(function(x), attend(x))
    assert (FUSIONS.made, FUSIONS.found) == (2, 0)


def test_a_size_of_one_is_another_fusion(nvfuser: str):
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x * y + x.sum(0)

    for rows, columns in ((3, 4), (1, 4), (3, 1), (5, 6)):
        torch._dynamo.reset()
        x, y = torch.randn(rows, columns), torch.randn(columns)
        torch.testing.assert_close(compiled(fn)(x, y), fn(x, y))
    assert (FUSIONS.made, FUSIONS.found) == (3, 1)


def test_instances_of_a_module_share_a_fusion(nvfuser: str):
    for _ in range(2):
        torch._dynamo.reset()
        model, x = net(), torch.randn(4, 8)
        with torch.no_grad():
            torch.testing.assert_close(compiled(model)(x), model(x))
    assert (FUSIONS.made, FUSIONS.found) == (1, 1)


def constant_program(number: float) -> FusionProgram:
    x = Input((-1,), (True,), "Float", (0,))
    step = Operation("mul", (Ref(0), Constant(number, "Float")))
    return FusionProgram((x,), (step,), (1,))


def test_the_least_recently_used_fusion_goes_first(nvfuser: str):
    module, fusions = vendor.load(), Fusions()
    first = fusions.get(constant_program(1.0), module, 2)
    fusions.get(constant_program(2.0), module, 2)
    assert fusions.get(constant_program(1.0), module, 2) is first
    fusions.get(constant_program(3.0), module, 2)
    assert len(fusions) == 2
    assert fusions.get(constant_program(1.0), module, 2) is first
    assert (fusions.made, fusions.found) == (3, 2)


def test_numbers_that_are_equal_in_python_are_different_fusions():
    nan = float("nan")
    programs = [constant_program(n) for n in (1, 1.0, True, 0.0, -0.0, nan)]
    assert len({p.key for p in programs}) == len(programs)
    assert constant_program(nan).key == constant_program(nan).key


def test_products_can_stay_in_eager(nvfuser: str):
    model, x = net(), torch.randn(4, 8)
    with torch.no_grad(), dynamo_backends.record() as reports:
        torch.testing.assert_close(compiled(model, matmul=False, min_block_size=1)(x), model(x))
    (report,) = reports
    reasons = {f.op: f.reason for f in report.fallbacks}
    assert reasons == {
        "aten.addmm.default": "the option matmul=False leaves matrix products to eager"
    }


def test_small_blocks_stay_in_eager(nvfuser: str):
    def fn(x: Tensor) -> Tensor:
        return (x * 2 + 1).sort()[0] * 3

    with dynamo_backends.record() as reports:
        x = torch.randn(5)
        torch.testing.assert_close(compiled(fn)(x), fn(x))
    reasons = {f.reason for f in reports[0].fallbacks}
    assert "its block has 2 operators, fewer than min_block_size=4" in reasons


def test_an_operation_that_this_version_does_not_have(
    nvfuser: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(vendor.NvFuserModule, "has", lambda self, name: name != "sinh")
    with dynamo_backends.record() as reports:
        x = torch.randn(5)
        torch.testing.assert_close(compiled(torch.sinh)(x), x.sinh())
    assert "this version of nvFuser has no 'sinh'" in reports[0].fallbacks[0].reason


def test_an_operation_that_nvfuser_refuses_is_left_to_eager(
    nvfuser: str, monkeypatch: pytest.MonkeyPatch
):
    replay = program._Replay._step

    def refuse(self: Any, step: Operation) -> None:
        if step.op == "exp":
            raise RuntimeError("INTERNAL ASSERT FAILED\nand more")
        replay(self, step)

    monkeypatch.setattr(program._Replay, "_step", refuse)
    with dynamo_backends.record() as reports:
        x = torch.randn(5)
        fn = lambda x: (x * 2).exp() + 1  # noqa: E731
        torch.testing.assert_close(compiled(fn, min_block_size=1)(x), fn(x))
    (fallback,) = reports[0].fallbacks
    assert fallback.op == "aten.exp.default"
    assert fallback.reason == "nvFuser refuses its exp: INTERNAL ASSERT FAILED"
    assert reports[0].blocks == 2


def test_a_definition_that_nvfuser_refuses(nvfuser: str):
    module = vendor.load()
    with pytest.raises(CompileError, match="nvFuser refuses the fusion"):
        program.define(FusionProgram(constant_program(1.0).inputs, (), (0,)), module)
    step = Operation("flip", (Ref(0),), origin="flip_1")
    with pytest.raises(LoweringError, match="nvFuser refuses its flip"):
        program.define(FusionProgram(constant_program(1.0).inputs, (step,), (1,)), module)


def program_of(model: nn.Module, x: Tensor) -> FusionProgram:
    """The fusion that a model becomes."""
    with torch.no_grad(), dynamo_backends.record() as reports:
        compiled(model)(x)
    (block,) = reports[0].executable.static_program.blocks
    program: FusionProgram = block.executable.run.program
    return program


def test_weights_of_linear_layers_are_not_transposed(nvfuser: str):
    program = program_of(net(), torch.randn(4, 8))
    layers = [step for step in program.steps if step.op == "linear"]
    assert len(layers) == 2
    for layer in layers:
        weight = layer.args[1]
        assert isinstance(weight, Ref)
        assert weight.value < len(program.inputs)


def test_nothing_in_a_program_is_a_size_of_this_call(nvfuser: str):
    program = program_of(net(), torch.randn(37, 8))
    assert "37" not in program.key


def test_numbers_on_the_cpu_are_copied_to_the_device():
    reader = Reader(0, torch.tensor(2.0), torch.device("meta"))
    assert reader([torch.tensor(3.0)]).device.type == "meta"


def test_inputs_of_other_shapes_are_refused_and_other_strides_copied():
    reader = Reader(1, torch.empty(3, 4), torch.device("cpu"))
    x = torch.randn(4, 3).t()
    read = reader([None, x])  # type: ignore[list-item]
    assert read.stride() == (4, 1)
    assert torch.equal(read, x)
    with pytest.raises(ValueError, match=r"compiled for torch.float32\[3, 4\], but called with"):
        reader([None, x.t()])  # type: ignore[list-item]


def test_a_block_without_a_tensor_on_a_device():
    with pytest.raises(CompileError, match="has no CUDA input"):
        lower_graph(graph_on("cpu"), symbolic=True)


@pytest.mark.parametrize(
    ("shape", "strides", "contiguity", "order"),
    [
        ((2, 3), (3, 1), (True, True), (1, 0)),
        ((2, 3), (1, 2), (True, True), (0, 1)),
        ((2, 3), (6, 2), (True, False), (1, 0)),
        ((1, 2, 3), (6, 3, 1), (None, True, True), (2, 1, 0)),
        ((2, 3, 1, 5, 4), (28, 4, 14, 0, 1), (False, None, True, None, True), (4, 2, 3, 1, 0)),
        ((2, 2, 2, 2), (8, 4, 0, 2), (True, True, None, False), (3, 2, 1, 0)),
        ((), (), (), ()),
    ],
)
def test_descriptors_are_nvfusers(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    contiguity: tuple[bool | None, ...],
    order: tuple[int, ...],
):
    """Examples of python_utils.h and of lightning-thunder; ties may be broken otherwise."""
    with FakeTensorMode():
        found = describe(torch.empty_strided(shape, strides))
    assert found.contiguity == contiguity
    assert found.stride_order == order
    assert found.shape == tuple(1 if n == 1 else -1 for n in shape)
