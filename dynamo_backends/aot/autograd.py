"""The only caller of AOT Autograd.

AOT Autograd turns what Dynamo captured into functional graphs: one for inference, or one forward
and one (lazily compiled) backward graph. It deals with mutated inputs, views and aliases, and
restores them around the compiled graphs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from dynamo_backends import _torch_private as private
from dynamo_backends.aot.double import refuse_double_backward
from dynamo_backends.aot.partition import partition_with
from dynamo_backends.aot.recurrent import recurrent_dropout
from dynamo_backends.report import Kind

GraphCompiler = Callable[[fx.GraphModule, Kind], Callable[[list[Any]], Sequence[Any]]]


def compile_functional(
    captured: fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_graph: GraphCompiler,
    decompositions: dict[Any, Callable[..., Any]],
    partitioner: str = "default",
) -> Callable[..., Any]:
    """Splits a captured graph and compiles each functional graph of it.

    Args:
        captured: Dynamo's torch-level graph.
        example_inputs: Dynamo's inputs, real tensors.
        compile_graph: Makes a boxed callable (list in, sequence out) of one functional graph.
        decompositions: Applied while tracing.
        partitioner: How forward and backward are told apart: "default" or "min_cut" (see
            `Options.partitioner`). Where `torch.utils.checkpoint` was used, both compute again
            what it names.

    Returns:
        What Dynamo calls in place of the captured graph.
    """

    def compiler(kind: Kind) -> Callable[..., Any]:
        def compile_kind(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
            private.keep_saved_tensors()
            with torch.no_grad():
                run = compile_graph(gm, kind)

            def boxed(args: list[Any]) -> Sequence[Any]:
                if kind == "backward":
                    refuse_double_backward()
                return run(args)

            boxed._boxed_call = True  # type: ignore[attr-defined]
            return boxed

        return compile_kind

    backend = private.aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        decompositions=decompositions,
        partition_fn=partition_with(partitioner),
    )
    with private.keep_unused_draws(), recurrent_dropout(captured):
        return backend(captured, example_inputs)
