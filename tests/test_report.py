"""Reports: what is recorded, for whom, and what is logged."""

import json
import logging
import threading

import pytest
import torch
from torch import Tensor, fx

import dynamo_backends
from dynamo_backends import GraphReport, record
from dynamo_backends.aot.inputs import inspect_captured
from dynamo_backends.interface.report import (
    Compilation,
    Fallback,
    InputReport,
    PartReport,
    send_to_recorders,
)
from tests.checking import check


def full_report() -> GraphReport:
    return GraphReport(
        "openxla",
        "inference",
        capture=3,
        ops_on_backend=2,
        ops_in_eager=1,
        fallbacks=(Fallback("aten.nonzero.default", "a size depends on data", 1, "a.py:3, x"),),
        inputs=(InputReport("x", "activation", "float32[3]", shares_memory_with=("y",)),),
        parts=(PartReport("eager", 1, {"aten.nonzero.default": 1}),),
        compilations=[Compilation(("x: float32[3]",), 1, 0, 0.5)],
        executable=object(),
    )


def test_a_report_is_json_without_its_executable():
    values = full_report().to_dict()
    assert json.loads(json.dumps(values)) == values
    assert "executable" not in values
    assert values["fallbacks"][0]["source"] == "a.py:3, x"
    assert values["parts"] == [
        {"runs_on": "eager", "ops": 1, "operators": {"aten.nonzero.default": 1}}
    ]
    assert values["compilations"][0]["shapes"] == ["x: float32[3]"]
    assert values["inputs"][0]["shares_memory_with"] == ["y"]


def test_recorders_see_what_is_published_while_they_are_active():
    report = full_report()
    with record() as outer:
        with record() as inner:
            thread = threading.Thread(target=send_to_recorders, args=(report,))
            thread.start()
            thread.join()
        send_to_recorders(report)
    send_to_recorders(report)
    assert (len(outer), len(inner)) == (2, 1)


def test_a_fallback_is_logged_once_per_graph(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        full_report().log_fallbacks()
    assert [r.getMessage() for r in caplog.records] == [
        "openxla: 1 of 3 operators of one inference graph run in eager "
        "(1x aten.nonzero.default: a size depends on data)"
    ]


def test_what_is_by_design_is_not_logged(caplog: pytest.LogCaptureFixture):
    report = full_report()
    report.fallbacks = (Fallback("aten.rand.default", "torch draws", 1, None, by_design=True),)
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        report.log_fallbacks()
    assert caplog.records == []


def test_aliases_of_inputs_and_outputs():
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = x * y
        return x[0], z, z.t()

    memory = torch.randn(4, 4)
    compiled = torch.compile(fn, backend="openxla")
    with record() as reports:
        compiled(memory, memory[:1])
    (report,) = reports
    shared = {each.name: each.shares_memory_with for each in report.inputs}
    assert shared == {"x": ("y",), "y": ("x",)}
    assert report.output_aliases == (
        "output 0 shares memory with x, y",
        "output 2 shares memory with output 1",
    )


def test_sparse_inputs_have_no_memory_in_common():
    graph = fx.Graph()
    for name in ("a", "b"):
        graph.placeholder(name).meta["example_value"] = torch.ones(2, 2).to_sparse()
    graph.output(())
    found = inspect_captured(fx.GraphModule({}, graph))
    assert [(x.name, x.shares_memory_with) for x in found.inputs] == [("a", ()), ("b", ())]


@pytest.mark.parametrize("write", ["add_", "out", "setitem", "inplace", "view"])
def test_the_line_of_an_update_in_place(write: str):
    def fn(x: Tensor, y: Tensor) -> Tensor:
        if write == "add_":
            x.add_(1)  # add_
        elif write == "out":
            torch.add(y, 1, out=x)  # out
        elif write == "setitem":
            x[0] = 1.0  # setitem
        elif write == "inplace":
            torch.nn.functional.relu(x, inplace=True)  # inplace
        else:
            x.view(-1)[1:].mul_(2)  # view
        return x + y

    (report,) = check(fn, torch.randn(2, 2), torch.randn(2, 2), ops_in_eager=None)
    mutated = {x.name: x.mutated_at for x in report.inputs if x.mutated}
    (line,) = mutated.pop("x")
    assert line.endswith(f"# {write}")
    assert __file__ in line
    assert mutated == {}


def test_graphs_of_one_capture_have_one_number():
    compiled = torch.compile(lambda x: (x * x).sin(), backend="openxla")
    x = torch.randn(3, requires_grad=True)
    with record() as reports:
        compiled(x).sum().backward()
        torch.compile(lambda x: x.cos() + 1, backend="openxla")(torch.ones(2))
    assert [r.kind for r in reports] == ["forward", "backward", "inference"]
    assert reports[0].capture == reports[1].capture != reports[2].capture


def test_public_names():
    assert dynamo_backends.GraphReport is GraphReport
    assert dynamo_backends.explain.__module__ == "dynamo_backends.capture.explain"
