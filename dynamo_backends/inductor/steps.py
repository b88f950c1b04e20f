"""Whole training steps compiled by Inductor: what computes, and what writes the results.

Inductor's programs are Python that calls one loop after the other, so one that writes over
parameters and state as it goes could be stopped halfway. Only the last program of a step writes,
and nothing stops it (see `phases`). Those before it are what `stages` makes of all the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import compile_step_with_inductor
from dynamo_backends.aot.step.program.backends import StepBackend
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.random_draws import draw
from dynamo_backends.inductor.decompositions import decompositions
from dynamo_backends.inductor.layouts import make_channels_last
from dynamo_backends.inductor.phases import Stage, cut, separate
from dynamo_backends.interface.errors import StepCaptureError
from dynamo_backends.interface.executable import StepProgram
from dynamo_backends.kernels.convolution_gradients import choose_kernels
from dynamo_backends.runtime.atomic_copies import defer_signals, fill_lost_tensors


def step_backend() -> StepBackend:
    """Returns how Inductor compiles steps."""
    # A loop on a GPU cannot read a tensor of the host.
    return StepBackend("inductor", decompositions(), InductorStep, keeps_scalars_on_device=True)


class InductorStep(StepProgram):
    """A step compiled by Inductor."""

    def __init__(self, graph: Graph):
        _check_draws(graph)
        phases = separate(graph)
        self._updated = [i for i, x in enumerate(graph.inputs) if x.updated_by is not None]
        self._handed = phases.handed
        self._rest = phases.rest
        self._compute = Chain(phases.compute, phases.handed)
        places = phases.write.graph.find_nodes(op="placeholder")
        given = [p.meta["val"] for p in places]
        given[: phases.handed] = self._compute.made[: phases.handed]
        self._write, _ = compile_step_with_inductor(phases.write, given, ())

    def __call__(self, inputs: Sequence[Tensor], taken: list[Any]) -> None:
        """See `StepProgram.__call__`."""
        updated = [inputs[i] for i in self._updated]
        # Not torch.no_grad(), which a signal at the wrong moment would leave on.
        apart = [x.detach() for x in inputs]
        written = [apart[i] for i in self._rest]
        self.launches += 1
        results = self._compute(apart)
        arguments = [*results[: self._handed], *written]
        del results[: self._handed]
        torch.autograd.graph.increment_version(updated)
        with defer_signals():
            self._overwrite(arguments, updated)
            taken.append(results)

    def _overwrite(self, arguments: list[Tensor], updated: list[Tensor]) -> None:
        try:
            self._write(arguments)
        except Exception as error:
            fill_lost_tensors(updated)
            raise StepCaptureError(
                f"writing the results of a training step failed ({error}). Its {len(updated)} "
                "parameters and optimizer states are lost and were filled with NaN. Load the last "
                "checkpoint."
            ) from error

    def outputs(self, taken: list[Any]) -> list[Tensor]:
        """See `StepProgram.outputs`."""
        results: list[Tensor] = taken[0]
        return results


def _check_draws(graph: Graph) -> None:
    """Refuses draws that are no operators; they remain where another draw depends on data."""
    if any(node.target is draw for node in graph.calls):
        raise StepCaptureError(
            "the step draws random numbers that depend on computed values, and Inductor would not "
            'keep their order. Use another backend ("aot_eager"), or pass fallback="split" to '
            "compile forward and backward separately."
        )


@dataclass(frozen=True)
class _Link:
    """One compiled stage of a step.

    Attributes:
        run: From a list of inputs, which it clears, to outputs.
        reads: Places of the inputs among all values of the step.
        makes: Places of the outputs.
        last: Places of inputs that nothing reads afterwards.
    """

    run: Callable[[list[Tensor]], Sequence[Any]]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    last: tuple[int, ...]


class Chain:
    """The stages of a step, as programs that run one after the other.

    Args:
        module: Its graph; its outputs are nodes.
        free: How many outputs, the first ones, may have other strides than they were traced with.

    Attributes:
        links: Its programs.
        made: The outputs as fake tensors.
    """

    def __init__(self, module: fx.GraphModule, free: int):
        results: Any = module.graph.output_node().args[0]
        make_channels_last(module, range(free, len(results)))
        choose_kernels(module)
        outputs: Any = module.graph.output_node().args[0]
        returned = [node.name for node in outputs]
        fixed = set(returned[free:])
        values = {p.name: p.meta["val"] for p in module.graph.find_nodes(op="placeholder")}
        stages = cut(module)
        names = dict.fromkeys([*values, *chain.from_iterable(s.makes for s in stages)])
        places = {name: i for i, name in enumerate(names)}
        self._size = len(places)
        self._outputs = [places[name] for name in returned]
        self.links: list[_Link] = []
        for number, stage in enumerate(stages):
            wanted = set(returned).union(*(s.reads for s in stages[number + 1 :]))
            last = [name for name in stage.reads if name not in wanted]
            used = [tuple(places[n] for n in names) for names in (stage.reads, stage.makes, last)]
            self.links.append(_Link(_compiled(stage, values, fixed), *used))
        self.made = [values[name] for name in returned]

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        """Returns the outputs; the list of inputs becomes empty."""
        values: list[Any] = [*inputs, *[None] * (self._size - len(inputs))]
        inputs.clear()
        for link in self.links:
            arguments = [values[i] for i in link.reads]
            for i in link.last:
                values[i] = None
            for i, value in zip(link.makes, link.run(arguments), strict=True):
                values[i] = value
        return [values[i] for i in self._outputs]


def _compiled(stage: Stage, values: dict[str, Any], fixed: set[str]) -> Any:
    """Compiles a stage; `values` has what it reads, and gets what it makes, as fake tensors.

    What is fixed keeps its strides; those of all else are Inductor's choice.
    """
    kept = [i for i, name in enumerate(stage.makes) if name in fixed]
    outputs: Any = stage.module.graph.output_node().args[0]
    made = [node.meta["val"] for node in outputs]
    inputs = [values[name] for name in stage.reads]
    run, strides = compile_step_with_inductor(stage.module, inputs, kept)
    for name, value, stride in zip(stage.makes, made, strides, strict=True):
        values[name] = value if stride is None else value.new_empty_strided(value.shape, stride)
    return run
