"""Infers shapes, strides, dtypes and devices of calls with fake tensors."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import (
    FakeTensorMode,
    HigherOrderOperator,
    find_fake_mode,
    is_statically_true,
)
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import empty_strided_like
from dynamo_backends.graph.properties import NORMAL_FORM, Pass, Property
from dynamo_backends.graph.symbolic_sizes import Symbolic, is_symbolic


class ShapeInference:
    """Sets `meta["val"]` of new calls by running them on fake tensors, cached by call.

    A call of numbers alone gives a fake tensor, too: of the mode of the other tensors in its graph.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Any] = {}
        self._mode: FakeTensorMode | None = None

    def __call__(self, node: fx.Node) -> None:
        """Sets a call's `meta["val"]` from those of its arguments."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        key = (node.target, describe_metadata(args), describe_metadata(list(kwargs.items())))
        if key not in self._known:
            self._mode = (
                find_fake_mode([args, kwargs]) or self._mode or fake_mode_of_nodes(node.graph.nodes)
            )
            with self._mode:
                self._known[key] = node.target(*args, **kwargs)  # type: ignore[operator]
        node.meta["val"] = self._known[key]

    def insert_call(self, graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Inserts a call at the insertion point and sets its `meta["val"]`."""
        node = graph.call_function(target, args, kwargs)
        self(node)
        return node


def propagate_fake_tensors(graph: Graph) -> bool:
    """Sets missing `meta["val"]` with fake tensors; returns whether any were missing.

    Passes that make calls set it themselves, by `ShapeInference`; this is for graphs that come
    without.
    """
    infer = ShapeInference()
    untyped = [node for node in graph.calls if "val" not in node.meta]
    for node in untyped:
        infer(node)
    return bool(untyped)


def find_metadata_mismatches(graph: Graph) -> Iterator[str]:
    """Runs a graph on fake tensors and yields each `meta["val"]` that differs.

    Sizes that depend on data, and what follows from them, are not checked: fake tensors have none.
    """
    values = [p.meta.get("val") for p in graph.placeholders]
    nodes = (*graph.placeholders, *graph.calls)
    mode = fake_mode_of_nodes(nodes) if any(map(is_symbolic, values)) else FakeTensorMode()
    known: dict[fx.Node, Any] = {}
    open_sizes = find_data_dependent_calls(graph)
    with _without_guards(mode), mode:
        for place, value in zip(graph.placeholders, values, strict=True):
            if "val" not in place.meta:
                yield f"placeholder {place.name} has no meta['val']"
            known[place] = _twin(value)
        for node in graph.calls:
            if "val" not in node.meta:
                yield f"{node.name} has no meta['val']"
                return
            if not all(n in known for n in node.all_input_nodes):
                continue  # an argument is no tensor: the graph of a higher-order operator
            known[node] = node.meta["val"]
            if isinstance(node.target, HigherOrderOperator):
                continue
            if node in open_sizes:
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            try:
                value = node.target(*args, **kwargs)  # type: ignore[operator]
            except Exception as error:
                yield f"{node.name} cannot be executed on fake tensors: {error}"
                continue
            if describe_metadata(value) != describe_metadata(node.meta["val"]):
                yield (
                    f"{node.name} has meta['val'] {describe_metadata(node.meta['val'])}, but "
                    f"{node.target} returns {describe_metadata(value)}"
                )
            known[node] = value


def fake_mode_of_nodes(nodes: Iterable[fx.Node]) -> FakeTensorMode:
    """Returns the `FakeTensorMode` of the nodes' tensors, or a new one if there are none.

    Numbers alone have no mode; a new one has their shape environment.
    """
    values = [node.meta.get("val") for node in nodes]
    mode = find_fake_mode(values)
    if mode is not None:
        return mode
    number = next((value for value in values if isinstance(value, Symbolic)), None)
    return FakeTensorMode(shape_env=None if number is None else number.node.shape_env)


def find_data_dependent_calls(graph: Graph) -> frozenset[fx.Node]:
    """Finds calls with data-dependent sizes, such as `aten.nonzero`, and their users."""
    found: set[fx.Node] = set()
    for node in graph.calls:
        tags = getattr(node.target, "tags", ())
        depends = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
        if depends or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def describe_metadata(value: Any) -> str:
    """Formats dtype, shape and significant strides, such as "float32[2, 3] (3, 1)"."""
    if isinstance(value, Tensor):
        strides = tuple(
            1 if is_statically_true(n == 1) or is_statically_true(value.numel() == 0) else s
            for n, s in zip(value.shape, value.stride(), strict=True)
        )
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} {strides}{where}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(describe_metadata, value))})"
    return repr(value)


def _twin(value: Any) -> Any:
    """A tensor like another one, of the fake mode that is active."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return value
    return empty_strided_like(value)


@contextlib.contextmanager
def _without_guards(mode: FakeTensorMode) -> Iterator[None]:
    """Keeps what is learnt about symbolic sizes while checking from becoming a guard."""
    shape_env = mode.shape_env
    with shape_env.suppress_guards() if shape_env is not None else contextlib.nullcontext():
        yield


PROPAGATE = Pass(
    name="propagate",
    summary="calls without shape, stride and dtype metadata get it from fake tensors",
    requires=NORMAL_FORM - {Property.TYPED},
    ensures=frozenset({Property.TYPED}),
    run=propagate_fake_tensors,
)
