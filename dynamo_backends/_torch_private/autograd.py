"""AOT Autograd and the autograd engine.

| what | checked |
|---|---|
| `torch._dynamo.backends.common.aot_autograd` | 2.11+ |
| `torch._guards.TracingContext.fw_metadata`: `static_input_indices`, `bw_donated_idxs` | 2.11+ |
| `...fw_metadata`: what else AOT Autograd does at a call (see `needs_no_runtime_wrapper`) | 2.11+ |
| `torch._C._is_any_autocast_enabled`, `_DisableAutocast` | 2.11+ |
| `torch._functorch.partitioners`: `default_partition`, `min_cut_...` | 2.11+ |
| `fx.Node.meta["partitioner_tag"]` and `["recompute"]` of joint graphs | 2.11+ |
| `torch._prims.rng_prims`, `torch._functorch.config.cse` | 2.11+ |
| `torch._dynamo.config.caching_precompile` | 2.11+ |
| `torch._functorch.config`: `bundled_autograd_cache`, `force_autograd_cache` | 2.11+ |
| `torch._functorch._aot_autograd.schemas.SerializableAOTDispatchCompiler` | 2.11+ |
| `torch._dynamo.aot_compile_types.BundledAOTAutogradSerializableCallable` | 2.11+ |
| `torch.compiler.config.cache_key_tag` (public) | 2.11+ |
| `Tensor._backward_hooks`, `._post_accumulate_grad_hooks` | 2.11+ |
| `Module._forward_hooks` etc., `Optimizer._optimizer_step_pre_hooks`, `..._post_hooks` | 2.11+ |
| `torch._C._current_autograd_node`, `_autograd._get_current_graph_task_keep_graph` | 2.11+ |
| `torch.autograd.Variable._execution_engine.queue_callback` | 2.13* |
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from dynamo_backends._torch_private.aot_graph_metadata import (
    captured_static_inputs,
    has_flattened_subclasses,
)

_PASS = "dynamo_backends.backward_pass"
_STATE = "dynamo_backends.generator_state"
_UPDATES = "dynamo_backends.updates"


def aot_autograd(**compilers: Any) -> Callable[..., Any]:
    """Returns a Dynamo backend function that passes AOT graphs to these compilers."""
    from torch._dynamo.backends.common import aot_autograd as adapter

    return adapter(**compilers)


def aot_cache_is_enabled() -> bool:
    """Returns whether torch keeps AOT Autograd's output on disk for later processes."""
    from torch._functorch import config

    kept: bool = torch._dynamo.config.caching_precompile or config.bundled_autograd_cache
    return kept


def must_be_serializable() -> bool:
    """Returns whether AOT Autograd's result must be serializable (in `aot_compile`)."""
    from torch._functorch import config

    required: bool = config.force_autograd_cache
    return required


def wrap_serializable_compiler(
    compiler: Callable[[fx.GraphModule, Sequence[Any]], Any],
) -> Callable[..., Any]:
    """Wraps a graph compiler to tell AOT Autograd that its results are serializable."""
    from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
    from torch._inductor.output_code import OutputCode

    return SerializableAOTDispatchCompiler(OutputCode, compiler)


def wrap_for_aot_compile(called: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps AOT Autograd's result in the type that `aot_compile` can save."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable

    if getattr(called, "serialize", None) is None:
        return called
    return BundledAOTAutogradSerializableCallable(called)


def tagging_cache_key(compiler: bytes | None) -> AbstractContextManager[None]:
    """Adds a compiler's hash to torch's cache keys (context manager)."""
    if compiler is None:
        return nullcontext()
    config: Any = torch.compiler.config
    mark = hashlib.sha256(compiler).hexdigest()
    patched: AbstractContextManager[None] = config.patch(
        cache_key_tag=f"{config.cache_key_tag} dynamo_backends {mark}"
    )
    return patched


def static_input_indices(captured: fx.GraphModule, functional: fx.Graph) -> Collection[int]:
    """Returns which of Dynamo's inputs are weights; for an AOT Autograd callback.

    Where a wrapper has more in it than a tensor, as a DTensor its mesh, AOT Autograd miscounts.

    Args:
        captured: Dynamo's graph.
        functional: AOT Autograd's.
    """
    if has_flattened_subclasses(functional):
        return captured_static_inputs(captured)
    metadata = _metadata()
    return frozenset(metadata.static_input_indices) if metadata is not None else frozenset()


_DUTIES = (
    "num_outputs_aliased",
    "num_intermediate_bases",
    "dynamic_outputs",
    "tokens",
    "is_rng_op_functionalized",
)


def needs_no_runtime_wrapper(inputs: int, updates: int) -> bool:
    """Returns whether AOT Autograd's runtime wrappers have nothing to do at a call.

    Else AOT Autograd makes views, wraps subclasses, sets the grad mode or changes what an input is.
    That it turns the caller's grad mode and autocast off is not counted.

    Args:
        inputs: How many inputs Dynamo's graph has.
        updates: How many of them get new contents, which the graph sees to (see
            `annotate_input_mutations`).
    """
    metadata = _metadata()
    if metadata is None:
        return False
    return (
        len(metadata.input_info) == inputs
        and metadata.num_mutated_inp_runtime_indices == updates
        and metadata.grad_enabled_mutation is None
        and not any(getattr(metadata, duty, True) for duty in _DUTIES)
        and not _has_subclasses(metadata)
    )


def annotate_input_mutations(gm: fx.GraphModule) -> None:
    """Annotates an AOT inference graph's output with the inputs that it mutates.

    Left out are inputs that become another tensor (`set_`), or change their shape or strides.
    """
    metadata = _metadata()
    if metadata is None or _has_subclasses(metadata):
        return
    output = gm.graph.output_node()
    results: Any = output.args[0]
    places = {p.meta.get("desc"): i for i, p in enumerate(gm.graph.find_nodes(op="placeholder"))}
    changed = [
        (at, getattr(desc, "mutated_input", None))
        for at, desc in enumerate(output.meta.get("desc") or ())
        if type(desc).__name__ == "InputMutationAOTOutput"
    ]
    mutated = metadata.mutated_inp_runtime_indices
    if len(changed) != len(mutated):
        return
    noted = [
        (places[target], at)
        for (at, target), index in zip(changed, mutated, strict=True)
        if target in places and _gets_contents(metadata.input_info[index], results[at])
    ]
    _mark([output], _UPDATES, tuple(noted))


def _gets_contents(info: Any, result: Any) -> bool:
    """Returns whether an input gets new contents, and nothing else, from a result."""
    return isinstance(result, fx.Node) and info.mutates_data and not info.mutates_metadata


def mutated_placeholders(joint: fx.Graph) -> list[fx.Node]:
    """Returns a joint graph's placeholders that are mutated after its forward part."""
    descriptions = joint.output_node().meta.get("desc") or ()
    targets = {getattr(desc, "mutated_input", None) for desc in descriptions} - {None}
    return [p for p in joint.find_nodes(op="placeholder") if p.meta.get("desc") in targets]


def annotated_input_mutations(graph: fx.Graph) -> dict[int, int]:
    """Returns the mutations that `annotate_input_mutations` noted: placeholder to result.

    Returns:
        From positions of placeholders to positions of results.
    """
    return dict((graph.output_node().meta.get("custom") or {}).get(_UPDATES, ()))


def _metadata() -> Any:
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    return context.fw_metadata if context is not None else None


def _has_subclasses(metadata: Any) -> bool:
    from torch._functorch._aot_autograd.schemas import SubclassCreationMeta

    ends = [*metadata.subclass_inp_meta, *metadata.subclass_fw_graph_out_meta]
    return any(isinstance(end, SubclassCreationMeta) for end in ends)


def without_autocast() -> AbstractContextManager[None]:
    """Disables autocast on all devices (context manager)."""
    off: AbstractContextManager[None] = torch._C._DisableAutocast()
    return off


def is_autocast_on() -> bool:
    """Returns whether autocast is on for any device; False in AOT Autograd's callbacks."""
    enabled: bool = torch._C._is_any_autocast_enabled()
    return enabled


def clear_donated_buffers() -> None:
    """Clears the donated buffers of the graph being compiled, so `retain_graph` works.

    AOT Autograd offers saved tensors to the compiler as scratch memory, and forbids
    `retain_graph=True` because of it.
    """
    donated = getattr(_metadata(), "bw_donated_idxs", None)
    if donated:
        donated.clear()  # one list, that several records of the graph share


def running_backward_node() -> Any:
    """Returns the autograd node running in this thread; None unless its graph is kept.

    A graph is kept with `retain_graph=True`, and with `create_graph=True` unless that is off.
    """
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        return None
    return torch._C._current_autograd_node()


def after_backward(function: Callable[[], object]) -> None:
    """Queues a function to be called when the running backward pass has succeeded."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def partition_function(name: str) -> Callable[..., Any]:
    """Returns torch's joint-graph partitioner "default" or "min_cut"."""
    from torch._functorch import partitioners

    functions: dict[str, Callable[..., Any]] = {
        "default": partitioners.default_partition,
        "min_cut": partitioners.min_cut_rematerialization_partition,
    }
    return functions[name]


def is_of_backward(node: fx.Node) -> bool:
    """Returns whether a joint graph's node was traced in the backward pass."""
    return node.meta.get("partitioner_tag") == "is_backward"


def mark_as_backward(node: fx.Node) -> None:
    """Tags a joint graph's node as part of the backward pass."""
    node.meta = {**node.meta, "partitioner_tag": "is_backward"}


def checkpoint_rng_operators() -> tuple[Any, Any]:
    """Returns the operators that run and save, or restore, an RNG state in a checkpoint."""
    from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

    return run_and_save_rng_state, run_with_rng_state


def divide_by_min_cut(
    joint: fx.GraphModule, late: Collection[fx.Node], early_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Splits a graph in two by torch's min-cut partitioner, which rematerializes values.

    Args:
        joint: The graph; its nodes get marks.
        late: Calls that belong to the second part, and with each all calls after it.
        early_outputs: How many of its first outputs the first part has to compute.

    Returns:
        The parts. Placeholders of the second have the names of nodes of the graph, and the first
        also returns those of them that are calls.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    for node in joint.graph.nodes:
        node.meta.pop("recompute", None)  # a checkpoint: the second run is in the graph already
        node.meta.pop("partitioner_tag", None)
        if node in late:
            node.meta["partitioner_tag"] = "must_be_in_backward"
    count = len(joint.graph.find_nodes(op="placeholder", sort=False))
    with config.patch(cse=False):  # which would undo a checkpoint
        return min_cut_rematerialization_partition(
            joint,
            (),
            num_fwd_outputs=early_outputs,
            static_lifetime_input_indices=list(range(count)),
        )


def mark_backward_pass(nodes: Iterable[fx.Node], number: int) -> None:
    """Marks nodes with the number of their backward pass; the mark survives retracing."""
    _mark(nodes, _PASS, number)


def backward_pass_number(node: fx.Node) -> int | None:
    """Returns the number of the backward pass that a node belongs to, or None."""
    number: int | None = (node.meta.get("custom") or {}).get(_PASS)
    return number


def mark_generator_state(nodes: Iterable[fx.Node], state: str) -> None:
    """Marks random calls with the generator state they use; the mark survives retracing."""
    _mark(nodes, _STATE, state)


def annotated_generator_state(node: fx.Node) -> str | None:
    """Returns the generator state that `mark_generator_state` put on a node, or None."""
    state: str | None = (node.meta.get("custom") or {}).get(_STATE)
    return state


def _mark(nodes: Iterable[fx.Node], key: str, value: Any) -> None:
    for node in nodes:
        node.meta = {**node.meta, "custom": {**node.meta.get("custom", {}), key: value}}


def hooks_on_gradient(tensor: torch.Tensor) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """Returns a leaf's gradient hooks and post-accumulate-grad hooks, by handle."""
    accumulated = tensor._post_accumulate_grad_hooks
    return tensor._backward_hooks or {}, accumulated or {}


def filter_hooked_tensors(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """Returns those tensors that have hooks on their gradients."""
    several = [t for t in tensors if t is not None]
    if not (any(map(_backward_hooks, several)) or any(map(_accumulated_hooks, several))):
        return []
    return [t for t in several if t._backward_hooks or t._post_accumulate_grad_hooks]


_backward_hooks = attrgetter("_backward_hooks")
_accumulated_hooks = attrgetter("_post_accumulate_grad_hooks")


def tables_of_hooks(owner: torch.nn.Module | torch.optim.Optimizer) -> list[Mapping[int, Any]]:
    """Returns the live tables of a module's or an optimizer's hooks, by handle."""
    names = (
        ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
        if isinstance(owner, torch.nn.Module)
        else ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    )
    return [getattr(owner, name) for name in names]
