"""How the inputs and outputs of a step's program are split over a mesh."""

from dataclasses import replace
from typing import Any

import jax

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import Exporter, Importer
from dynamo_backends.graph.roles import Role
from dynamo_backends.interface.mesh import MeshLayout
from dynamo_backends.xla.dtypes import to_jax
from dynamo_backends.xla.lowering.context import LoweringOptions
from dynamo_backends.xla.mesh.devices import MeshDevice


class Splits:
    """The shardings of a program.

    Args:
        device: All devices of the mesh.
        graph: Of the step.
        layout: Where its inputs and outputs are.

    Attributes:
        inputs: One sharding per input.
        outputs: One per output; what is updated stays where it is.
        results: Shape and dtype of each output, as the program has it.
    """

    def __init__(self, device: MeshDevice, graph: Graph, layout: MeshLayout):
        values = [p.meta["val"] for p in graph.placeholders]
        importers = list(map(Importer, values))
        self.inputs: list[Any] = [
            device.sharding(placement, importer.storage.order)
            for placement, importer in zip(layout.inputs, importers, strict=True)
        ]
        self.outputs: list[Any] = [self.inputs[i] for i in graph.updates]
        self.results = [
            jax.ShapeDtypeStruct(importers[i].dense_shape, to_jax(importers[i].dtype))
            for i in graph.updates
        ]
        first = len(self.outputs)
        for node, placement in zip(graph.outputs[first:], layout.outputs[first:], strict=True):
            value = node.meta["val"]
            export = Exporter(value)
            storage = export.storage
            self.outputs.append(device.sharding(placement, storage.order, storage.expanded))
            self.results.append(jax.ShapeDtypeStruct(export.dense_shape, to_jax(value.dtype)))


def splitting(
    options: LoweringOptions, device: MeshDevice, graph: Graph, layout: MeshLayout
) -> LoweringOptions:
    """Returns the options for a graph that XLA splits.

    Where all devices share the first dimension of the batch, they are named.

    Args:
        options: Of the lowering for one device.
        device: All devices of the mesh.
        graph: What is lowered.
        layout: Where its inputs are.
    """
    placements = [
        placement
        for given, placement in zip(graph.inputs, layout.inputs, strict=True)
        if given.role is Role.ACTIVATION
    ]
    is_shared = any(placement and set(placement) == {0} for placement in placements)
    return replace(options, partitioned=True, grid=device.grid if is_shared else None)
