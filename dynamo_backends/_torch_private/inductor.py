"""Inductor, called by hand.

| what | checked |
|---|---|
| `torch._inductor.standalone_compile`, `torch._inductor.compile` | 2.11+ |
| `torch._inductor.compile_fx`: `compile_fx_inner`, `fake_tensor_prop`, ... | 2.11+ |
| `torch._inductor.compile_fx.fw_compiler_freezing`, and its `TracingContext` | 2.13, 2.15 |
| `torch._inductor.compile_fx.create_compiler_config_extra` | 2.15 |
| `torch._inductor.decomposition.select_decomp_table`, `torch._inductor.lowering` | 2.11+ |
| `torch._inductor.fx_passes.joint_graph.joint_graph_passes` | 2.11+ |
| `torch._inductor.virtualized.V`, `torch._guards.TracingContext.report_output_strides` | 2.11+ |
| `torch._inductor.config.post_grad_custom_post_pass` (takes the last FX graph) | 2.13.0 |
| `torch._inductor.custom_graph_pass.CustomInferenceAwareGraphPass` (newer torch) | 2.13.0 |
| `torch.compiler.config.cache_key_tag`, `torch._inductor.cpu_vec_isa.pick_vec_isa` | 2.13.0 |
| `torch._inductor.lowering.make_fallback` | 2.11+ |
| `torch._inductor.ir.ExternKernel.require_channels_last` | 2.11+ |
| `torch.ops.mkldnn._convolution_pointwise` | 2.11+ |
| `torch._C._nn.mkldnn_reorder_conv2d_weight` | 2.11+ |
"""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from dynamo_backends._torch_private.inductor_compiler import (
    forgetting_constants,
    packed_weights_in_cache,
    preset_vector_isa,
    settings_for_casts,
)
from dynamo_backends._torch_private.joined_kernels import (
    defer_precompiled_header,
    joining_kernels,
)
from dynamo_backends._torch_private.tracing import (
    disable_current_modes,
    find_fake_mode,
    keeping_unused_draws,
)


def compile_with_inductor(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compiles a functional graph with static shapes, given its fake inputs."""
    from torch._inductor import config, standalone_compile

    with torch.no_grad(), _compiling(), config.patch(settings_for_casts(gm.graph)):
        return standalone_compile(gm, list(inputs), dynamic_shapes="from_graph")


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns Inductor's decompositions except those of random operators."""
    from torch._inductor.decomposition import select_decomp_table

    import_module("torch._inductor.lowering")  # which a decomposition reads without importing it
    with keeping_unused_draws():
        return select_decomp_table()


def compile_step_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], kept: Collection[int]
) -> tuple[Callable[[list[Tensor]], Sequence[Any]], Sequence[tuple[int, ...] | None]]:
    """Compiles a decomposed part of a training step; returns its output strides too.

    Args:
        gm: The graph.
        inputs: One fake tensor per placeholder, all of one mode.
        kept: Which outputs have the strides that the graph gives them; Inductor chooses those of
            the others.

    Returns:
        A function that takes a list of inputs, and clears it; and the strides of its outputs, None
        for those of the graph.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import (
        compile_fx_inner,
        fake_tensor_prop,
        view_to_reshape,
    )
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    preset_vector_isa()
    mode = find_fake_mode(list(inputs))
    # In training oneDNN's LSTM returns a workspace of which the fake kernel does not know the size.
    aten = torch.ops.aten
    layers = (aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default)
    lstm = any(node.target in layers for node in gm.graph.nodes)
    settings = config.patch(
        size_asserts=config.size_asserts and not lstm, **settings_for_casts(gm.graph)
    )
    context = tracing(TracingContext(mode)), V.set_fake_mode(mode), keeping_unused_draws()
    gm.graph.output_node().meta["user_visible_output_idxs"] = sorted(kept)
    places = gm.graph.find_nodes(op="placeholder")
    strides_changed = any(
        p.meta["val"].stride() != x.stride() for p, x in zip(places, inputs, strict=True)
    )
    with torch.no_grad(), settings, context[0], context[1], context[2], _compiling():
        if strides_changed:
            view_to_reshape(gm)
            fake_tensor_prop(gm, list(inputs))
        joint_graph_passes(gm)
        with TracingContext.report_output_strides() as strides:
            compiled: Any = compile_fx_inner(gm, list(inputs))
    outputs: Any = gm.graph.output_node().args[0]
    # A graph without calls is not compiled, and nothing is said of its outputs.
    return (lambda args: compiled(args)), list(strides or [None] * len(outputs))


def mode_for_inductor() -> FakeTensorMode:
    """Makes a `FakeTensorMode` with a `ShapeEnv`, which Inductor's disk cache needs.

    It has a record of sizes, without which Inductor does not keep graphs on disk.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def compile_frozen_with_inductor(
    module: fx.GraphModule, inputs: Sequence[Tensor], settings: dict[str, Any]
) -> Callable[..., Any]:
    """Compiles a functional graph with Inductor, which may freeze the module's buffers.

    Args:
        module: The graph; weights are buffers that `get_attr` nodes read.
        inputs: One fake tensor per placeholder, all of one mode.
        settings: Settings of `torch._inductor.config`, in force for this compilation alone.
    """
    from torch import _inductor
    from torch._guards import TracingContext

    mode = find_fake_mode(inputs) or mode_for_inductor()
    with _freezing(TracingContext(mode)):
        return _inductor.compile(module, list(inputs), options=right_for_constants(settings))


def compile_decomposed_with_inductor(
    module: fx.GraphModule, inputs: Sequence[Tensor], settings: dict[str, Any]
) -> Callable[..., Any]:
    """Compiles a decomposed graph with frozen weights, without retracing it.

    Args:
        module: See there; decomposed as Inductor wants it, and no output is an input, a weight, or
            a view of one. It is changed.
        inputs: See there.
        settings: See there; "freezing" is on.

    Raises:
        AttributeError: Inductor of this version cannot be called like this; the module is spoilt.
        TypeError: Likewise.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import TracingContext
    from torch._inductor import config
    from torch._inductor.compile_fx import (
        compile_fx_inner,
        fake_tensor_prop,
        fw_compiler_freezing,
    )
    from torch._inductor.virtualized import V

    mode = find_fake_mode(inputs) or mode_for_inductor()
    weights = _lifted(module)
    context = TracingContext(mode)
    # What freezing asks of AOT Autograd: nothing is updated, and no output shares memory.
    context.fw_metadata = _Metadata()  # type: ignore[assignment]
    context.params_flat = list(weights)
    context.params_flat_unwrap_subclasses = list(weights)
    context.params_unwrapped_to_flat_index = list(range(len(weights)))
    given = [mode.from_tensor(w, static_shapes=True) for w in weights] + list(inputs)
    with (
        _freezing(context),
        enable_python_dispatcher(),
        V.set_fake_mode(mode),
        config.patch(right_for_constants(settings)),
    ):
        fake_tensor_prop(module, given, True)
        run = fw_compiler_freezing(
            module,
            given,
            dynamo_model=module,
            num_example_inputs=len(inputs),
            inner_compile=compile_fx_inner,
            **_without_cudagraphs(module),
        )
    frozen = [None] * len(weights)
    return lambda *args: run([*frozen, *args])


def _without_cudagraphs(module: fx.GraphModule) -> dict[str, Any]:
    """Returns the arguments of `fw_compiler_freezing` besides the graph, without CUDA graphs."""
    from torch._inductor import compile_fx
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.utils import BoxedBool

    together = "compiler_config_extra"
    if together in inspect.signature(compile_fx.fw_compiler_freezing).parameters:
        extra: Any = compile_fx.create_compiler_config_extra(module)
        return {together: dataclasses.replace(extra, cudagraphs=BoxedBool(False))}
    return {
        "cudagraphs": BoxedBool(False),
        "graph_id": next(_numbers),
        "forward_device": BoxedDeviceIndex(None),
    }


@contextmanager
def _freezing(context: Any) -> Iterator[None]:
    """Makes Inductor freeze weights and keep its code on disk (context manager).

    Args:
        context: The `TracingContext` of the compilation.
    """
    from torch._guards import tracing

    with (
        forgetting_constants(),
        torch.no_grad(),
        tracing(context),
        _compiling(),
        packed_weights_in_cache(),
    ):
        yield


def right_for_constants(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns settings with the pass that templates need where they pack constants."""
    from torch._inductor import config

    if not any(settings.get(name, getattr(config, name)) for name in _PACK):
        return settings
    name = "post_grad_custom_post_pass"
    return {**settings, name: _followed_by(getattr(config, name), _own_storage)}


_numbers = itertools.count(1 << 30)  # torch counts its own graphs from 0


class _Metadata:
    """The parts of `ViewAndMutationMeta` that Inductor reads of a graph without updates."""

    bw_donated_idxs = None

    def __init__(self) -> None:
        self.input_info: list[Any] = []
        self.output_info: list[Any] = []
        self.static_input_indices: list[int] = []


def _lifted(module: fx.GraphModule) -> list[Tensor]:
    """Turns a module's constants into leading placeholders; returns their values."""
    first = next(iter(module.graph.nodes))
    constants = module.graph.find_nodes(op="get_attr")
    values = [attrgetter(str(node.target))(module) for node in constants]
    for node in constants:
        with module.graph.inserting_before(first):
            place = module.graph.placeholder(f"{node.name}_frozen")
        place.meta = node.meta
        node.replace_all_uses_with(place)
        module.graph.erase_node(node)
    module.recompile()
    return values


@contextmanager
def _compiling() -> Iterator[None]:
    """Sets up Inductor: joined kernels, cache keys with the vector ISA (context manager).

    Kernels share files. Graphs kept on disk are for processors with these vectors: their loops are
    written for one width, which is no part of Inductor's key; compiled on another processor that
    has the same folder, they compute something else.
    """
    import torch.compiler.config
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    preset_vector_isa()
    config: Any = torch.compiler.config
    tag, own = config.cache_key_tag, f"vectors {pick_vec_isa()}"
    key = config.patch(cache_key_tag=tag if tag.endswith(own) else f"{tag} {own}")
    with key, joining_kernels(), defer_precompiled_header():
        yield


def compile_quantized_with_inductor(
    module: fx.GraphModule, inputs: Sequence[Tensor]
) -> Callable[..., Any]:
    """Compiles a module some of whose weights are torchao tensors.

    Args:
        module: Functional calls and modules of linear layers.
        inputs: One per placeholder.
    """
    from torch import _inductor
    from torch._guards import TracingContext, tracing

    preset_vector_isa()
    settings = {"freezing": True}
    # A context of its own: in that of a capture, sizes of inputs would become symbols.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with forgetting_constants(), torch.no_grad(), tracing(TracingContext(mode)), _compiling():
        return _inductor.compile(module, list(inputs), options=settings)


_PACK = ("max_autotune", "max_autotune_gemm")
"""Settings under which templates for products pack constants when a graph is compiled."""


def _own_storage(graph: fx.Graph) -> None:
    """Gives constants that begin within a storage, such as folded slices of a weight, their own.

    The templates read a constant by `as_strided` with the offset that its node has relative to the
    constant, and this takes it for one into the storage.
    """
    module: Any = graph.owning_module
    with disable_current_modes():
        for name in {str(node.target) for node in graph.find_nodes(op="get_attr")}:
            value = attrgetter(name)(module)
            if isinstance(value, Tensor) and not value.is_mkldnn and value.storage_offset():
                owner, _, last = name.rpartition(".")
                setattr(module.get_submodule(owner), last, _at_the_start(value))


def _at_the_start(value: Tensor) -> Tensor:
    """Returns a copy of a tensor with the same strides, from the start of a storage of its own."""
    sizes = zip(value.shape, value.stride(), strict=True)
    extent = 1 + sum((n - 1) * stride for n, stride in sizes) if value.numel() else 0
    memory = value.as_strided((extent,), (1,)).clone()
    return memory.as_strided(value.shape, value.stride())


def _followed_by(passes: Any, last: Callable[[fx.Graph], None]) -> Callable[[fx.Graph], None]:
    """Returns the passes that a setting of Inductor's names, and another one after them."""
    from torch._inductor import custom_graph_pass

    told = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", ())
    several = isinstance(passes, (list, tuple))
    before = list(passes) if several else [] if passes is None else [passes]

    def run(graph: fx.Graph) -> None:
        for each in before:
            if isinstance(each, told):
                each(graph, is_inference=True)
            else:
                each(graph)
        last(graph)

    return run


def import_inductor() -> None:
    """Imports Inductor's modules in advance, which is not safe in two threads at once."""
    for name in ("compile_fx", "codecache", "cpp_builder", "cpu_vec_isa", "graph"):
        import_module(f"torch._inductor.{name}")


def register_channels_last_fallback(operator: Any) -> None:
    """Registers an operator as a fallback of Inductor whose 4-D arguments must be channels-last.

    Args:
        operator: Its arguments that are nodes of four dimensions get that memory format.
    """
    from torch._inductor.ir import ExternKernel
    from torch._inductor.lowering import make_fallback

    def channels_last(_: fx.Node, *args: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def arrange(x: Any) -> Any:
            image = hasattr(x, "get_size") and len(x.get_size()) == 4
            return ExternKernel.require_channels_last(x) if image else x

        return tuple(map(arrange, args)), {}

    make_fallback(operator, layout_constraint=channels_last, warn=False)


def prepacked_convolution(
    image: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    groups: int,
) -> Callable[[Tensor], Tensor]:
    """Packs a weight for oneDNN; returns the convolution as Inductor's freezing does.

    Args:
        image: Image of the shape and layout that it will be called with.
        weight: Dense.
        stride: Stride of height and width, as is the padding.
        padding: On each side.
        groups: Groups of channels.
    """
    settings = (list(padding), list(stride), [1, 1], groups)
    reorder: Any = torch._C._nn.mkldnn_reorder_conv2d_weight
    packed = reorder(weight.to_mkldnn(), *settings, image.shape)
    run: Any = torch.ops.mkldnn._convolution_pointwise.default
    return lambda x: run(x, packed, None, *settings, "none", [], "")
