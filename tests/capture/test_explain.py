"""`explain` names the right reason and the right line, and leaves no trace."""

import html
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import Explainer, OptionError, UnknownBackendError, explain
from dynamo_backends.capture.graph_breaks import GraphBreak, SourceLine
from tests.test_errors import unheard_of


def marked_line(fn: Callable[..., Any]) -> int:
    """The number of the line of `fn` that ends in the comment "here"."""
    lines, first = inspect.getsourcelines(fn)
    (offset,) = [i for i, line in enumerate(lines) if line.rstrip().endswith("# here")]
    return first + offset


def the_break(fn: Callable[..., Any], *args: Any, graphs: int) -> GraphBreak:
    explanation = explain(fn, *args, backend="eager")
    assert len(explanation.graphs) == graphs
    (found,) = explanation.breaks
    assert found.source is not None
    assert found.source.file == __file__
    assert found.source.line == marked_line(fn)
    assert found.source.code.endswith("# here")
    return found


def branches(x: Tensor) -> Tensor:
    y = x + 1
    if y.sum() > 0:  # here
        return y * 2
    return y


def reads_item(x: Tensor) -> Tensor:
    y = x + 1
    scale = y.sum().item()  # here
    return y * scale


def prints(x: Tensor) -> Tensor:
    y = x + 1
    print("a line of the program")  # here
    return y * 2


def calls_numpy(x: Tensor) -> Tensor:
    y = x + 1
    middle = np.interp(0.5, [0.0, 1.0], y.numpy())  # here
    return y * float(middle)


def breaks_in_a_loop(x: Tensor) -> Tensor:
    for _ in range(2):
        x = x + 1
        print("a line of the program")  # here
    return x


def test_a_data_dependent_branch():
    found = the_break(branches, torch.ones(3), graphs=2)
    assert found.reason == "data-dependent branch"
    assert "depends on the value of a tensor" in found.explanation
    assert not found.skipped


def test_item():
    found = the_break(reads_item, torch.ones(3), graphs=2)
    assert "Tensor.item()" in found.reason
    assert any("capture_scalar_outputs" in hint for hint in found.hints)


def test_print(capsys: pytest.CaptureFixture[str]):
    found = the_break(prints, torch.ones(3), graphs=2)
    assert "builtin" in found.reason
    assert "`print`" in found.explanation
    assert capsys.readouterr().out == "a line of the program\n"


def test_a_numpy_call():
    found = the_break(calls_numpy, torch.ones(2), graphs=2)
    assert "interp" in found.explanation


def test_a_break_in_a_loop_leaves_the_function_to_eager():
    found = the_break(breaks_in_a_loop, torch.ones(3), graphs=0)
    assert found.skipped
    assert "`print`" in found.explanation
    assert "for/while loop" in found.explanation
    assert found.function == "breaks_in_a_loop"


def test_an_unsupported_operator():
    def fn(x: Tensor) -> Tensor:
        y = (x * 2).sin() + 1
        y = unheard_of(y)  # here
        return y.cos() * y - 1

    (graph,) = explain(fn, torch.ones(3)).graphs
    (report,) = graph.reports
    (fallback,) = report.fallbacks
    assert fallback.op == "dynamo_backends_tests.unheard_of.default"
    assert fallback.reason == "it has no lowering to XLA"
    assert fallback.count == 1
    assert f"{__file__}:{marked_line(fn)}, y = unheard_of(y)" in str(fallback.source)
    assert [(p.runs_on, p.ops) for p in report.parts] == [
        ("openxla", 3),
        ("eager", 1),
        ("openxla", 3),
    ]
    assert (report.blocks, report.ops_on_backend, report.ops_in_eager) == (2, 6, 1)


def test_an_in_place_operator_on_an_aliased_input():
    def fn(a: Tensor, b: Tensor) -> Tensor:
        y = b * 2
        a.add_(1)  # here
        return y + a

    memory = torch.zeros(2, 3)
    explanation = explain(fn, memory, memory[:1])
    (report,) = explanation.reports
    (shared,) = report.inputs
    assert shared.mutated
    assert set(shared.name.removeprefix("the memory of ").split(", ")) == {"a", "b"}
    assert shared.mutated_at == (f"{__file__}:{marked_line(fn)}, a.add_(1)  # here",)
    assert "updated in place: the memory of" in str(explanation)
    assert torch.equal(memory, torch.ones(2, 3)), "the function really ran"


def scaled(x: Tensor, k: int) -> Tensor:
    shifted = x + 1  # here
    return shifted * k


def recompiled_by(*calls: tuple[Any, ...], dynamic: bool | None = None) -> Any:
    with Explainer(scaled, backend="eager", dynamic=dynamic) as call:
        for args in calls:
            call(*args)
    explanation = call.explanation()
    assert len(explanation.graphs) == len(calls) == explanation.calls
    assert [g.recompiled for g in explanation.graphs] == [False, True]
    (found,) = explanation.recompilations
    assert found.function == "scaled"
    return found


def test_a_recompilation_by_shape():
    found = recompiled_by((torch.ones(3), 2), (torch.ones(4), 2))
    assert found.kind == "shape"
    assert found.reason == "tensor 'x' size mismatch at index 0. expected 3, actual 4"
    assert found.source.line == marked_line(scaled)


def test_a_recompilation_by_dtype():
    found = recompiled_by((torch.ones(3), 2), (torch.ones(3).double(), 2))
    assert found.kind == "dtype"
    assert found.reason == "tensor 'x' dtype mismatch. expected Float, actual Double"
    assert found.source.line == marked_line(scaled)


def test_a_recompilation_by_a_constant():
    found = recompiled_by((torch.ones(3), 2), (torch.ones(3), 7))
    assert found.kind == "constant"
    assert found.reason == "k == 2"
    assert found.source.line == marked_line(scaled) + 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x)).relu()


def test_inputs_of_an_inference_graph_are_frozen():
    model = Model().eval()
    with torch.no_grad():
        (report,) = explain(model, torch.ones(3, 4)).reports
        (loose,) = explain(model, torch.ones(3, 4), options={"freezing": "off"}).reports
    assert report.kind == "inference"
    roles = {x.name: (x.role, x.frozen, x.reason) for x in report.inputs}
    assert roles.pop("x") == ("activation", False, "")
    assert roles.pop("self.norm.running_mean") == ("buffer", True, "")
    assert roles["self.fc.weight"] == ("parameter", True, "")
    weights = [x for x in loose.inputs if x.role != "activation"]
    assert {x.reason for x in weights} == {'the option freezing is "off"'}


def test_training_gives_forward_and_backward():
    model = Model().train()
    explanation = explain(model, torch.ones(3, 4))
    forward, backward = explanation.reports
    assert (forward.kind, backward.kind) == ("forward", "backward")
    assert forward.capture == backward.capture
    inputs = {x.name: x for x in forward.inputs}
    assert inputs["self.fc.weight"].reason.startswith("weights are not frozen in training graphs")
    mean = inputs["self.norm.running_mean"]
    assert (mean.mutated, mean.reason) == (True, "the graph updates it in place")
    assert "self.norm(self.fc(x))" in mean.mutated_at[0]
    assert backward.executables == 1
    assert all(p.grad is None for p in model.parameters()), "no gradient is left behind"


def test_executables_and_the_shapes_that_made_them():
    options = {"bucket_growth": 1}
    with Explainer(lambda x: x.sin() * 2, dynamic=True, options=options) as call:
        for n in (3, 5, 3):
            call(torch.ones(n))
    (report,) = call.explanation().reports
    assert [c.shapes for c in report.compilations] == [("x: float32[3]",), ("x: float32[5]",)]
    assert report.executables == 2
    assert [c.executables for c in report.compilations] == [1, 1]
    assert sum(c.seconds for c in report.compilations) == pytest.approx(report.compile_seconds)


def test_cache_hits():
    fn = lambda x: x.cos() * 3  # noqa: E731
    first, second = explain(fn, torch.ones(3)), explain(fn, torch.ones(3))
    assert [e.reports[0].cache_hits for e in (first, second)] == [0, 1]


def test_guards_are_summarised_and_listed():
    guards = explain(scaled, torch.ones(3), 2, backend="eager").guards
    assert guards.count == len(guards.guards) == sum(guards.kinds.values())
    assert guards.kinds["TENSOR_MATCH"] == 1
    (constant,) = [g for g in guards.guards if g.kind == "CONSTANT_MATCH"]
    assert (constant.name, constant.checks) == ("k", ("k == 2",))
    assert constant.source is not None
    assert constant.source.line == marked_line(scaled) + 1


def test_everything_is_json_and_can_be_saved(tmp_path: Path):
    explanation = explain(Model(), torch.ones(3, 4))
    explanation.save(tmp_path / "explanation.json")
    loaded = json.loads((tmp_path / "explanation.json").read_text())
    assert loaded == explanation.to_dict()
    assert loaded["graphs"][0]["reports"][0]["inputs"][0]["role"] == "parameter"


def test_the_report_says_it_all(capsys: pytest.CaptureFixture[str]):
    def fn(x: Tensor) -> Tensor:
        y = unheard_of(x.sin() * x + 1)
        if y.sum() > 0:
            return y * 2
        return y

    print(explain(fn, torch.ones(3)))
    text = capsys.readouterr().out
    for words in (
        "2 graphs",
        "1 graph break",
        "operators 3 on openxla, 3 in eager; 1 block",
        "parts, with their operators: openxla 3 | eager 3",
        "dynamo_backends_tests.unheard_of.default",
        "it has no lowering to XLA",
        "data-dependent branch",
        "if y.sum() > 0:",
        "for x: float32[3]",
        "TENSOR_MATCH",
    ):
        assert words in text
    assert "\x1b" not in text


def test_other_backends_have_fewer_facts():
    explanation = explain(scaled, torch.ones(3), 2, backend="aot_eager")
    (graph,) = explanation.graphs
    assert graph.reports == ()
    assert graph.operators == {"add": 1, "mul": 1}
    assert graph.source == SourceLine(
        __file__, scaled.__code__.co_firstlineno, "def scaled(x: Tensor, k: int) -> Tensor:"
    )


def test_a_function_as_backend():
    seen = []

    def mine(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        seen.append(gm)
        return gm.forward

    assert explain(scaled, torch.ones(3), 2, backend=mine).backend == "mine"
    assert len(seen) == 1
    with pytest.raises(OptionError, match="takes no options"):
        explain(scaled, torch.ones(3), 2, backend=mine, options={"verify": True})


def test_a_misspelt_backend():
    with pytest.raises(UnknownBackendError, match="Did you mean 'inductor'"):
        explain(scaled, torch.ones(3), 2, backend="inducto")


def test_nothing_to_capture():
    explanation = explain(lambda k: k + 1, 2, backend="eager")
    assert explanation.graphs == ()
    assert "captured nothing" in str(explanation)


def test_a_call_outside_the_block_is_refused():
    explainer = Explainer(scaled, backend="eager")
    with pytest.raises(RuntimeError, match="inside its `with` block"):
        explainer(torch.ones(3), 2)


def test_a_refused_fallback_is_raised():
    refused = dynamo_backends.FallbackRefusedError
    with pytest.raises(refused, match=r"cannot run dynamo_backends_tests\.unheard_of"):
        explain(lambda x: unheard_of(x) + 1, torch.ones(3), options={"fallback": "error"})


@pytest.mark.parametrize("measured", [explain, dynamo_backends.coverage])
def test_a_notebook_shows_the_same_as_print(measured: Callable[..., Any]):
    found = measured(scaled, torch.ones(3), 2)
    page = found._repr_html_()
    body = re.fullmatch(r'<pre style="[^"]*">(.*)</pre>', page, re.DOTALL)
    assert body is not None
    text = html.unescape(re.sub(r"<[^>]*>", "", body[1]))
    assert [line.rstrip() for line in text.splitlines()] == str(found).splitlines()
    assert "\x1b" not in page
