"""Every private torch API that this package uses, in one place.

Each is listed with the torch versions for which it was checked: "run" means that the tests passed
with that version. Code elsewhere imports these names from here and never from torch's insides.

| what | checked |
|---|---|
| `torch._prims_common.elementwise_dtypes` | 2.13 run |
| `torch._functorch.aot_autograd.aot_module_simplified` | 2.13 run |
| `torch._functorch._aot_autograd.descriptors`: `PlainAOTInput`, ... | 2.13 run |
| `torch._dynamo.backends.common.aot_autograd` | 2.13 run |
| `torch._guards.TracingContext.fw_metadata.static_input_indices` | 2.13 run |
| `torch._guards.TracingContext.fw_metadata.bw_donated_idxs` | 2.13 run |
| `torch._functorch.partitioners`: `default_partition`, `min_cut_...` | 2.13 run |
| `fx.Node.meta["partitioner_tag"]` of joint graphs, `torch._prims.rng_prims` | 2.13 run |
| `torch._dynamo.utils.same` | 2.13 run |
| `torch._C._to_dlpack`, `torch._C._from_dlpack`, `torch._C._has_storage` | 2.13 run |
| `torch.utils._python_dispatch`: `_disable_current_modes`, `is_traceable_wrapper_...` | 2.13 run |
| `torch._ops.OpOverload`, `torch._decomp.core_aten_decompositions` | 2.13 run |
| `torch._decomp._core_aten_decompositions_post_autograd` | 2.13 run |
| `torch._ops.HigherOrderOperator`, `OpOverload.has_kernel_for_dispatch_key` | 2.13 run |
| `torch._inductor.config.fallback_random`, set for the calling thread alone | 2.13 run |
| `torch._guards.detect_fake_mode`, `torch.fx.node.has_side_effect` | 2.13 run |
| `torch.fx.node._get_qualified_name` | 2.13 run |
| `fx.Node._dynamo_source`, `UntypedStorage._cdata`, `torch._C._storage_Use_Count` | 2.13 run |
| `torch._dynamo.utils._metrics_context_tls` | 2.13 run |
| `fx.Node.meta["tensor_dict"]`, `torch.SymInt.node.hint` | 2.13 run |
| `torch._inductor.standalone_compile`, `torch.utils.flop_counter.flop_registry` | 2.13 run |
| `torch._C._dispatch_get_all_op_names`, `_dispatch_has_kernel_for_dispatch_key` | 2.13 run |
| `torch._subclasses.FakeTensorMode`, `torch._dynamo.utils.counters` | 2.13 run |
| `torch._decomp.decomposition_table`, `torch.fx.experimental.proxy_tensor.make_fx` | 2.13 run |
| `torch.onnx._internal.exporter`: `_core`, `_registration`, `_ir_passes` | 2.13 run |
| `torch.onnx._internal.fx.passes.type_promotion` | 2.13 run |
| `torch._C.Graph` and TorchScript's types, `torch._C._create_function_from_graph` | 2.13 run |
| `torch._C.ScriptModule._register_attribute`, `_define`, `torch.jit._recursive` | 2.13 run |
| `torch._C._jit_to_static_module`, `_llvm_enabled`, `_jit_set_llga_enabled` | 2.13 run |
| `torch._C._jit_set_texpr_fuser_enabled`, `_jit_set_profiling_executor`, ... | 2.13 run |
| `torch._lazy`: `ts_backend`, `computation`, `metrics`, `sync_multi` | 2.13 run |
| `torch._inductor.compile`, `torch._guards.tracing`, `TracingContext` | 2.13 run |
| `torch._functorch.aot_autograd.aot_export_module`, its signature's mutations | 2.13 run |
| `torch._dispatch.python.enable_python_dispatcher` | 2.13 run |
| `torch._C._current_autograd_node`, `_autograd._get_current_graph_task_keep_graph` | 2.13 run |
| `torch.compiler._is_compiling_flag`, `torch._inductor.compile_fx.compile_fx_inner` | 2.13 run |
| `torch._subclasses.fake_tensor.FakeTensor`, `FakeTensorMode.from_tensor` | 2.13 run |
| `ShapeEnv.bound_sympy`, `torch.utils._sympy.numbers.int_oo` | 2.13 run |
| `torch.fx.experimental.symbolic_shapes.statically_known_true` | 2.13 run |
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as _KIND
from torch._prims_common import elementwise_dtypes
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import has_side_effect
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

to_dlpack: Callable[[Tensor], Any] = torch._C._to_dlpack
from_dlpack: Callable[[Any], Tensor] = torch._C._from_dlpack
jit: Any = torch._C  # TorchScript's intermediate representation: `Graph` and the types

_PASS = "dynamo_backends.backward_pass"

ELEMENTWISE_PROMOTION = {
    "default": _KIND.DEFAULT,
    "int_to_float": _KIND.INT_TO_FLOAT,
    "to_bool": _KIND.ALWAYS_BOOL,
    "complex_to_float": _KIND.COMPLEX_TO_FLOAT,
}


def aot_autograd(**compilers: Any) -> Callable[..., Any]:
    """torch's own adapter from AOT Autograd to a Dynamo backend function."""
    from torch._dynamo.backends.common import aot_autograd as adapter

    return adapter(**compilers)


def static_input_indices() -> Collection[int]:
    """Inside an AOT Autograd callback: which of Dynamo's inputs are parameters and buffers."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return frozenset(metadata.static_input_indices) if metadata is not None else frozenset()


def keep_saved_tensors() -> None:
    """Inside an AOT Autograd callback: says that the backward graph overwrites no saved tensor.

    AOT Autograd offers saved tensors to the compiler as scratch memory, and forbids
    `retain_graph=True` because of it.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    donated = getattr(metadata, "bw_donated_idxs", None)
    if donated:
        donated.clear()  # one list, that several records of the graph share


def running_backward() -> Any:
    """The autograd node whose backward is running in this thread; None if none keeps its graph.

    A graph is kept with `retain_graph=True`, and with `create_graph=True` unless that is off.
    """
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        return None
    return torch._C._current_autograd_node()


def partition_function(name: str) -> Callable[..., Any]:
    """AOT Autograd's splitting of a joint graph: "default" or "min_cut"."""
    from torch._functorch import partitioners

    functions: dict[str, Callable[..., Any]] = {
        "default": partitioners.default_partition,
        "min_cut": partitioners.min_cut_rematerialization_partition,
    }
    return functions[name]


def is_of_backward(node: fx.Node) -> bool:
    """Whether a node of a joint graph was traced in the backward pass."""
    return node.meta.get("partitioner_tag") == "is_backward"


def mark_as_backward(node: fx.Node) -> None:
    """Says that a node of a joint graph belongs to the backward pass."""
    node.meta = {**node.meta, "partitioner_tag": "is_backward"}


def checkpoint_draws() -> tuple[Any, Any]:
    """The operators with which a checkpoint draws and saves the generator's state; and redraws."""
    from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

    return run_and_save_rng_state, run_with_rng_state


def dynamo_input_index(placeholder: fx.Node) -> int | None:
    """Which of Dynamo's inputs a placeholder of an AOT graph is; None if it is none of them."""
    return getattr(placeholder.meta.get("desc"), "idx", None) if is_plain(placeholder) else None


def described_input_index(placeholder: fx.Node) -> int | None:
    """As `dynamo_input_index`; for a base that replaced several views of it, the first of these."""
    return _index(placeholder.meta.get("desc"))


def _index(desc: Any) -> int | None:
    while (base := getattr(desc, "base_of", None)) is not None:
        desc = base
    return getattr(desc, "idx", None) if type(desc).__name__ == "PlainAOTInput" else None


def dynamo_source_name(placeholder: fx.Node) -> str | None:
    """Where a placeholder of a graph of Dynamo's comes from: "L['self']._modules['fc']"."""
    source = getattr(placeholder, "_dynamo_source", None)
    return source.name if source is not None else None


def copy_captured(captured: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph of Dynamo's, with what AOT Autograd knows of its inputs."""
    nodes: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    graph.output(graph.graph_copy(captured.graph, nodes))
    graph.output_node().meta = dict(captured.graph.output_node().meta)
    for node, copied in nodes.items():
        if hasattr(node, "_dynamo_source"):
            copied._dynamo_source = node._dynamo_source
    result = fx.GraphModule(captured, graph)
    for name, value in vars(captured).items():
        if name not in vars(result):
            setattr(result, name, value)
    result.meta.update(captured.meta)
    return result


def captured_static_inputs(captured: fx.GraphModule) -> frozenset[int]:
    """Which inputs of a graph of Dynamo's are parameters and buffers."""
    return frozenset(
        i
        for i, node in enumerate(captured.graph.find_nodes(op="placeholder"))
        if node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
    )


@contextlib.contextmanager
def apart_from_compilation() -> Iterator[None]:
    """Inside a backend called by Dynamo: as if no compilation were going on in this thread.

    Dynamo counts a compilation's metrics; a backward graph that is compiled meanwhile, which is a
    compilation of its own, would overwrite them, and torch forbids that.
    """
    from torch._dynamo import utils

    local: Any = getattr(utils, "_metrics_context_tls", None)
    current: Any = getattr(local, "metrics_context", None)
    if current is None:
        yield
        return
    local.metrics_context = type(current)(on_exit=lambda *_: None)
    try:
        yield
    finally:
        local.metrics_context = current


def concrete(value: Any) -> Any:
    """A symbolic number as it is in the call that is compiled; anything else as it is."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.hint
    return value


def function_name(function: Callable[..., Any]) -> str:
    """Under which name a function that a graph calls can be imported: "torch.conv2d"."""
    from torch.fx.node import _get_qualified_name

    return _get_qualified_name(function)


def storage_id(tensor: Tensor) -> int | None:
    """What two tensors have in common that share memory, also fake ones, which have no address.

    None for tensors without a storage, such as sparse ones.
    """
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def storage_users(storage: torch.UntypedStorage) -> int:
    """How many tensors share a storage; `storage` itself, a Python object, is not counted."""
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def is_plain(placeholder: fx.Node) -> bool:
    """Whether a placeholder of an AOT graph is one of Dynamo's inputs."""
    return type(placeholder.meta.get("desc")).__name__ == "PlainAOTInput"


def is_tangent(placeholder: fx.Node) -> bool:
    """Whether a placeholder of an AOT backward graph is an incoming gradient."""
    return type(placeholder.meta.get("desc")).__name__ == "TangentAOTInput"


def mutated_input_indices(graph: fx.Graph) -> frozenset[int]:
    """Which of Dynamo's inputs an AOT graph updates."""
    descs = graph.output_node().meta.get("desc") or ()
    return frozenset(i for i in map(mutated_input_index, descs) if i is not None)


def updated_inputs(graph: fx.Graph) -> dict[int, Any]:
    """The new content of each of Dynamo's inputs that an AOT graph updates.

    A base that several views have in common counts as the first of these.
    """
    output = graph.output_node()
    descs = output.meta.get("desc") or ()
    updated = [_index(getattr(desc, "mutated_input", None)) for desc in descs]
    values: Any = output.args[0]
    return {i: v for i, v in zip(updated, values, strict=False) if i is not None}


def mutated_input_index(desc: Any) -> int | None:
    """Which of Dynamo's inputs an output of an AOT graph is the new content of, by its `desc`."""
    if type(desc).__name__ != "InputMutationAOTOutput":
        return None
    return getattr(desc.mutated_input, "idx", None)


def output_index(desc: Any) -> int | None:
    """Which of Dynamo's outputs an output of an AOT graph is, by its `desc`."""
    return getattr(desc, "idx", None) if type(desc).__name__ == "PlainAOTOutput" else None


def is_composite(op: OpOverload) -> bool:
    """Whether torch always replaces an operator by others while tracing.

    Not one that devices have kernels of their own for, as for silu_backward.
    """
    keys = torch._C.DispatchKey
    has = op.has_kernel_for_dispatch_key
    return bool(has(keys.CompositeImplicitAutograd) and not has(keys.CPU))


def all_operator_names() -> tuple[str, ...]:
    """Every operator that torch knows by now, such as "aten::softmax.int"."""
    return tuple(torch._C._dispatch_get_all_op_names())


def composite_names() -> frozenset[str]:
    """Those that torch always replaces by others: "aten.softmax", "aten.softmax.int"."""
    kind = "CompositeImplicitAutograd"
    names = set()
    for name in all_operator_names():
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, kind):
            namespace, _, rest = name.partition("::")
            packet, _, overload = rest.partition(".")
            names |= {f"{namespace}.{packet}", f"{namespace}.{packet}.{overload or 'default'}"}
    return frozenset(names)


def keep_unused_draws() -> contextlib.AbstractContextManager[Any]:
    """While it is active, tracing in this thread keeps calls that draw numbers nobody reads.

    Without them the draws that follow would differ from eager's.
    """
    from torch._inductor import config

    manager: contextlib.AbstractContextManager[Any] = config.patch(fallback_random=True)
    return manager


def counts_flops(op: OpOverload) -> bool:
    """Whether torch counts an operator's floating-point operations: products and such."""
    from torch.utils.flop_counter import flop_registry

    return op.overloadpacket in flop_registry


def compile_with_inductor(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compiles a functional graph with static shapes; `inputs` are its fake inputs."""
    from torch._inductor import standalone_compile

    with torch.no_grad():
        return standalone_compile(gm, list(inputs), dynamic_shapes="from_graph")


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own kind, which wrappers and fakes have not."""
    return bool(torch._C._has_storage(tensor))


def lookup_backend(name: str) -> Callable[..., Any]:
    """The function that `torch.compile(backend=name)` calls."""
    from torch._dynamo import lookup_backend as look_up

    return look_up(name)


def dynamo_counters() -> Any:
    """Dynamo's own counts of graphs, breaks and frames."""
    from torch._dynamo.utils import counters

    return counters


def same(reference: Any, result: Any, fp64_reference: Any, **settings: Any) -> bool:
    """The accuracy rule of PyTorch's own benchmark runners."""
    from torch._dynamo.utils import same as rule

    return rule(reference, result, fp64_reference, **settings)


@functools.cache
def core_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """torch's core ATen decompositions, but for composite operators.

    Tracing replaces those anyway; looking for them among all operators takes 0.3 seconds.
    """
    from torch._decomp import _core_aten_decompositions_post_autograd

    table: Any = _core_aten_decompositions_post_autograd()
    return dict(table)


def all_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Every decomposition that torch has, the core ones first."""
    from torch._decomp import decomposition_table

    core = core_aten_decompositions()
    return {**{k: v for k, v in decomposition_table.items() if isinstance(k, OpOverload)}, **core}


def make_fx(fn: Callable[..., Any], decompositions: Any) -> Callable[..., fx.GraphModule]:
    """Traces a function on fake tensors to an ATen graph."""
    from torch.fx.experimental.proxy_tensor import make_fx as trace

    return trace(fn, decomposition_table=decompositions)


@contextlib.contextmanager
def compiling(answer: bool) -> Iterator[None]:
    """Inside: what `torch.compiler.is_compiling()` says, in all threads."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = answer
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def tracing_a_step(mode: FakeTensorMode) -> Iterator[None]:
    """Inside: calls run on fake tensors, and `torch.compiler.is_compiling()`."""
    from torch._dispatch.python import enable_python_dispatcher

    with compiling(True), mode, enable_python_dispatcher(), keep_unused_draws():
        yield


def functionalized(
    gm: fx.GraphModule, fakes: Sequence[Any], decompositions: Any
) -> tuple[fx.GraphModule, dict[int, int]]:
    """A graph without writes to memory, out of one that writes to its inputs.

    Args:
        gm: An ATen graph.
        fakes: One fake tensor per placeholder.
        decompositions: Applied while tracing.

    Returns:
        The graph, whose first outputs are new contents of inputs, and for each of these the
        position of the input.
    """
    from torch._functorch.aot_autograd import aot_export_module

    exported: Any = aot_export_module(
        gm, list(fakes), trace_joint=False, decompositions=decompositions
    )
    traced, signature = exported
    places = {name: i for i, name in enumerate(signature.user_inputs)}
    updates = {**signature.buffers_to_mutate, **signature.user_inputs_to_mutate}
    outputs: Any = traced.graph.output_node().args[0]
    order = {node.name: i for i, node in enumerate(outputs) if isinstance(node, fx.Node)}
    return traced, {order[out]: places[target] for out, target in updates.items()}


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """What Inductor wants decomposed while a graph is traced; calls that draw stay as they are."""
    from torch._inductor.decomposition import select_decomp_table

    with keep_unused_draws():
        return select_decomp_table()


def compile_step_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], kept: Collection[int]
) -> tuple[Callable[[list[Tensor]], Sequence[Any]], Sequence[tuple[int, ...] | None]]:
    """Compiles a functional graph that is part of a step, decomposed as Inductor wants it.

    Args:
        gm: The graph.
        inputs: One fake tensor per placeholder, all of one mode.
        kept: Which outputs have the strides that the graph gives them; Inductor chooses those of
            the others.

    Returns:
        A function that takes a list of inputs, and clears it; and the strides of its outputs.
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

    mode = detect_fake_mode(list(inputs))
    # In training oneDNN's LSTM returns a workspace of which the fake kernel does not know the size.
    aten = torch.ops.aten
    layers = (aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default)
    lstm = any(node.target in layers for node in gm.graph.nodes)
    asserts = config.patch(size_asserts=config.size_asserts and not lstm)
    context = tracing(TracingContext(mode)), V.set_fake_mode(mode), keep_unused_draws()
    gm.graph.output_node().meta["user_visible_output_idxs"] = sorted(kept)
    places = gm.graph.find_nodes(op="placeholder")
    strides_changed = any(
        p.meta["val"].stride() != x.stride() for p, x in zip(places, inputs, strict=True)
    )
    with torch.no_grad(), asserts, context[0], context[1], context[2]:
        if strides_changed:
            view_to_reshape(gm)
            fake_tensor_prop(gm, list(inputs))
        joint_graph_passes(gm)
        with TracingContext.report_output_strides() as strides:
            compiled: Any = compile_fx_inner(gm, list(inputs))
    return (lambda args: compiled(args)), list(strides or ())


def divide_by_min_cut(
    joint: fx.GraphModule, late: Collection[fx.Node], early_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's division of a graph in two, which chooses what the second part computes again.

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


def graph_being_traced() -> fx.Graph:
    """What `make_fx` records in this thread."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer.graph


def mark_backward_pass(nodes: Iterable[fx.Node], number: int) -> None:
    """Says which backward pass of a step nodes belong to; tracing the graph again keeps that."""
    for node in nodes:
        node.meta = {**node.meta, "custom": {**node.meta.get("custom", {}), _PASS: number}}


def backward_pass(node: fx.Node) -> int | None:
    """Which backward pass a node belongs to; None: to none."""
    number: int | None = (node.meta.get("custom") or {}).get(_PASS)
    return number


def size_bounds(size: torch.SymInt) -> tuple[int, int | None]:
    """The least and the largest value that a symbolic size can have; None: there is no bound."""
    from torch.utils._sympy.numbers import int_oo

    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    lower = 0 if bounds.lower in (-int_oo, int_oo) else max(int(bounds.lower), 0)
    return lower, None if bounds.upper == int_oo else int(bounds.upper)


def surely(condition: bool | torch.SymBool) -> bool:
    """Whether a condition holds whatever sizes there will be; asking makes no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def onnx_registry(opset: int) -> Any:
    """The lowerings from ATen to ONNX that `torch.onnx.export(dynamo=True)` uses."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    return ONNXRegistry.from_torchlib(opset)


def onnx_placeholder(node: fx.Node, model: Any, values: dict[str, Any], registry: Any) -> None:
    """Adds a graph input to an ONNX model; `values` gets the value for the node's name."""
    from torch.onnx._internal.exporter import _core

    opset = _core._get_onnxscript_opset(registry.opset_version)
    _core._handle_placeholder_node(
        node, values, graph_like=model.graph, lower="at_conversion", opset=opset
    )


def onnx_call(
    node: fx.Node, model: Any, values: dict[str, Any], constants: dict[Any, Any], registry: Any
) -> None:
    """Adds the lowering of one ATen call to an ONNX model.

    Args:
        node: The call.
        model: The `onnx_ir.Model` to extend.
        values: ONNX values by node name; gets the results of the call.
        constants: Constants made so far, to be shared.
        registry: From `onnx_registry`.
    """
    from torch.onnx._internal.exporter import _core

    node.meta.setdefault("nn_module_stack", {})  # its absence is logged, one line per node
    _core._handle_call_function_node_with_lowering(
        model,
        node,
        values,
        graph_like=model.graph,
        constant_farm=constants,
        registry=registry,
        opset=_core._get_onnxscript_opset(registry.opset_version),
        node_name_to_local_functions={},
    )


def onnx_opset_imports(model: Any) -> None:
    """Declares every operator set that an ONNX model uses."""
    from torch.onnx._internal.exporter._ir_passes import add_opset_imports

    add_opset_imports(model)


def promote_types(module: fx.GraphModule, fakes: Sequence[Any], mode: FakeTensorMode) -> None:
    """Makes torch's type promotion explicit, in place, with casts before the calls that need them.

    Args:
        module: An ATen graph.
        fakes: One fake tensor of `mode` per placeholder.
        mode: Under which the graph is run.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.traceback import preserve_node_meta
    from torch.onnx._internal.fx.passes import type_promotion

    interpreter = type_promotion._TypePromotionInterpreter(module, _promotion_table())
    with mode, enable_python_dispatcher(), preserve_node_meta():
        interpreter.run(*fakes)


@functools.cache
def _promotion_table() -> Any:
    from torch.onnx._internal.fx.passes.type_promotion import TypePromotionTable

    return TypePromotionTable()


def script_function(graph: Any) -> Callable[..., Any]:
    """The function that executes a TorchScript graph."""
    function: Callable[..., Any] = torch._C._create_function_from_graph("forward", graph)
    return function


def script_module(function: Any, tensors: Sequence[Tensor | None]) -> Any:
    """A script module, in eval mode, that calls a script function.

    Args:
        function: From `script_function`.
        tensors: One per parameter of the function: an attribute of the module, or None for what
            is a parameter of the module's `forward`.
    """
    from torch.jit import _recursive

    module: Any = jit.ScriptModule("Block", torch._C.CompilationUnit(), True)
    names = [f"x{i}" for i in range(len(tensors))]
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is not None:
            module._register_attribute(name, torch._C.TensorType.get(), tensor)
    pairs = list(zip(names, tensors, strict=True))
    parameters = ", ".join(["self", *(name for name, tensor in pairs if tensor is None)])
    arguments = ", ".join(name if tensor is None else f"self.{name}" for name, tensor in pairs)
    source = f"def forward({parameters}):\n    return function({arguments})\n"
    concrete = torch._C.ConcreteModuleType.from_jit_type(module._type())
    module._define(concrete, source, {"function": function}.get)
    return _recursive.wrap_cpp_module(module).eval()


def static_module(module: Any) -> Callable[..., Any]:
    """Static Runtime's form of a frozen script module; not safe to call in two threads at once."""
    static: Callable[..., Any] = torch._C._jit_to_static_module(module._c)
    return static


@contextlib.contextmanager
def torchscript_fuser(nnc: bool, onednn: bool) -> Iterator[None]:
    """TorchScript's executor profiles, and fuses with these compilers, inside the block.

    `torch.jit.fuser` does that too, but prints a warning about nvFuser each time.
    """
    c = torch._C
    before = c._jit_can_fuse_on_cpu(), c._jit_can_fuse_on_gpu(), c._jit_texpr_fuser_enabled()
    onednn_before = c._jit_llga_enabled()
    executor, optimize = c._jit_set_profiling_executor(True), c._get_graph_executor_optimize(True)
    try:
        c._jit_override_can_fuse_on_cpu(True)
        c._jit_override_can_fuse_on_gpu(nnc)
        c._jit_set_texpr_fuser_enabled(nnc)
        c._jit_set_llga_enabled(onednn)
        yield
    finally:
        c._jit_set_llga_enabled(onednn_before)
        c._jit_set_texpr_fuser_enabled(before[2])
        c._jit_override_can_fuse_on_gpu(before[1])
        c._jit_override_can_fuse_on_cpu(before[0])
        c._get_graph_executor_optimize(optimize)
        c._jit_set_profiling_executor(executor)


def has_llvm() -> bool:
    """Whether TorchScript's compiler NNC can generate code for this processor."""
    return torch._C._llvm_enabled()


def has_onednn_graph() -> bool:
    """Whether TorchScript's fuser for oneDNN Graph is part of this torch."""
    before = torch._C._jit_llga_enabled()
    try:
        torch._C._jit_set_llga_enabled(True)
    except RuntimeError:
        return False
    torch._C._jit_set_llga_enabled(before)
    return True


def start_lazy_backend() -> None:
    """Makes the device "lazy" usable, by torch's own backend on TorchScript."""
    from torch._lazy import ts_backend

    ts_backend.init()


def lazy_fallbacks() -> dict[str, int]:
    """How often each operator has been run on the device "lazy" by torch's CPU kernel so far."""
    from torch._lazy import metrics

    names = [name for name in metrics.counter_names() if name.startswith("aten::")]
    return {name: metrics.counter_value(name) for name in names}


def lazy_id(tensor: Tensor) -> int:
    """What identifies a lazy tensor."""
    from torch._lazy import get_tensor_id

    return get_tensor_id(tensor)


def lazy_graph(tensors: Sequence[Tensor]) -> tuple[str, list[int], list[Any]]:
    """The pending computation of lazy tensors.

    Returns:
        The hash under which it is kept once it is compiled, and the lazy ids and the values of the
        data that it reads.
    """
    from torch._lazy import computation

    ids, values = computation.get_tensors_ts_device_data_node(list(tensors))
    return computation.get_graph_hash(list(tensors)), ids, values


def lazy_sync(tensors: Sequence[Tensor]) -> None:
    """Compiles and runs the pending computation of lazy tensors."""
    from torch._lazy import sync_multi

    sync_multi(list(tensors), [])


def lazy_run(hash: str, inputs: Sequence[Any]) -> list[Tensor]:
    """Runs a compiled computation on CPU tensors.

    Raises:
        RuntimeError: There is none under that hash (any more).
    """
    from torch._lazy import computation

    return computation.run_cached_graph(hash, inputs)


def compile_frozen_with_inductor(
    module: fx.GraphModule, inputs: Sequence[Tensor], settings: dict[str, Any]
) -> Callable[..., Any]:
    """Compiles a functional graph with Inductor, which may freeze the module's buffers.

    Args:
        module: The graph; weights are buffers that `get_attr` nodes read.
        inputs: One fake tensor per placeholder, all of one mode.
        settings: Of `torch._inductor.config`, in force for this compilation alone.
    """
    from torch import _inductor
    from torch._guards import TracingContext, tracing

    mode = detect_fake_mode(inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad(), tracing(TracingContext(mode)):
        return _inductor.compile(module, list(inputs), options=settings)


__all__ = [
    "ELEMENTWISE_PROMOTION",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "all_decompositions",
    "all_operator_names",
    "aot_autograd",
    "apart_from_compilation",
    "backward_pass",
    "captured_static_inputs",
    "checkpoint_draws",
    "compile_frozen_with_inductor",
    "compile_step_with_inductor",
    "compile_with_inductor",
    "compiling",
    "composite_names",
    "concrete",
    "copy_captured",
    "core_aten_decompositions",
    "core_decompositions",
    "counts_flops",
    "described_input_index",
    "detect_fake_mode",
    "disable_current_modes",
    "divide_by_min_cut",
    "dynamo_counters",
    "dynamo_input_index",
    "dynamo_source_name",
    "elementwise_dtypes",
    "from_dlpack",
    "function_name",
    "functionalized",
    "graph_being_traced",
    "has_llvm",
    "has_onednn_graph",
    "has_side_effect",
    "has_storage",
    "inductor_decompositions",
    "is_composite",
    "is_of_backward",
    "is_plain",
    "is_tangent",
    "is_traceable_wrapper_subclass",
    "jit",
    "keep_saved_tensors",
    "keep_unused_draws",
    "lazy_fallbacks",
    "lazy_graph",
    "lazy_id",
    "lazy_run",
    "lazy_sync",
    "lookup_backend",
    "mark_as_backward",
    "mark_backward_pass",
    "mutated_input_index",
    "mutated_input_indices",
    "onnx_call",
    "onnx_opset_imports",
    "onnx_placeholder",
    "onnx_registry",
    "output_index",
    "partition_function",
    "promote_types",
    "running_backward",
    "same",
    "script_function",
    "script_module",
    "size_bounds",
    "start_lazy_backend",
    "static_input_indices",
    "static_module",
    "storage_id",
    "storage_users",
    "surely",
    "to_dlpack",
    "torchscript_fuser",
    "tracing_a_step",
    "updated_inputs",
]
