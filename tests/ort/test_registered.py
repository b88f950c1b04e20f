"""Names of the operators that the exporter can lower."""

import operator
from collections.abc import Iterator

import pytest
import torch

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.decomposition_tables import all_decomposition_rules
from dynamo_backends.onnx import exporter_lowerings


@pytest.fixture(autouse=True)
def _not_known() -> Iterator[None]:
    exporter_lowerings._names.cache_clear()
    yield
    exporter_lowerings._names.cache_clear()


def test_they_are_those_of_the_exporters_registry():
    table = exporter_lowerings.exporter_registry()
    overloads = {getattr(packet, name) for packet in map(_packet, dir(torch.ops.aten)) if packet
                 for name in packet.overloads()}  # fmt: skip
    overloads |= {op for op in all_decomposition_rules() if isinstance(op, OpOverload)}
    differ = [
        op
        for op in overloads
        if exporter_lowerings.has_exporter_lowering(op) != table.is_registered(op)
    ]
    assert len(overloads) > 1000
    assert differ == []
    assert exporter_lowerings.has_exporter_lowering(operator.add)
    assert torch.ops.aten.cos.default in exporter_lowerings.registered_overloads()


def _packet(name: str) -> torch._ops.OpOverloadPacket | None:
    found = getattr(torch.ops.aten, name, None)
    return found if isinstance(found, torch._ops.OpOverloadPacket) else None


def test_a_second_process_does_not_load_the_lowerings(monkeypatch: pytest.MonkeyPatch):
    first = exporter_lowerings.registered_overloads()
    exporter_lowerings._names.cache_clear()
    monkeypatch.setattr(
        exporter_lowerings, "exporter_registry", lambda: pytest.fail("lowerings are loaded")
    )
    assert exporter_lowerings.registered_overloads() == first
    assert exporter_lowerings.has_exporter_lowering(torch.ops.aten.cos.default)
    assert not exporter_lowerings.has_exporter_lowering(torch.ops.aten.linalg_eig.default)


def test_operators_that_are_not_registered_here_are_left_out(monkeypatch: pytest.MonkeyPatch):
    names = exporter_lowerings._names()
    further = {"nobodys.operator.default", "aten.cos.no_such_overload", "aten.cos_nobody.out"}
    with monkeypatch.context() as patch:
        patch.setattr(exporter_lowerings, "_names", lambda: names | further)
        known = exporter_lowerings.registered_overloads()
    assert torch.ops.aten.cos.default in known
    assert not further & set(map(str, known))
