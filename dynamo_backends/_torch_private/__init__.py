"""Collects every private torch API that this package uses, with hooks of Dynamo beside them.

Each module lists what it reaches for with the torch versions for which it was checked. "2.11+"
stands for 2.13.0, with which every change is tested, and for 2.11.0, 2.12.1, 2.14.1 and 2.15.0:
with 2.12.1 and 2.15.0 all tests ran once, with each of them a share (docs/versions.md), and the
code was mended where they failed. "2.13*" stands for 2.13.0, 2.11.0 and 2.15.0.

Code elsewhere imports these names from here and never from torch's insides. `watching` and
`control`, which steer Dynamo itself, are imported apart.
"""

# ruff: noqa: F401 - all of these are names for the rest of the package

from dynamo_backends._torch_private import scaling
from dynamo_backends._torch_private.aoti import (
    SharedLibrary,
    compile_ahead,
    compute_size,
    open_library,
)
from dynamo_backends._torch_private.around import (
    accumulation,
    count_registrations,
    hooks_of_node,
    is_in_ddp_forward,
    keep_node_hooks,
    note_registrations,
    saved_tensors_hooks,
    tables_of_global_hooks,
)
from dynamo_backends._torch_private.autograd import (
    after_backward,
    aot_autograd,
    aot_cache_is_enabled,
    backward_pass,
    checkpoint_draws,
    divide_by_min_cut,
    hooks_on_gradient,
    in_form_to_save,
    is_autocast_on,
    is_of_backward,
    keep_saved_tensors,
    kept_under,
    mark_as_backward,
    mark_backward_pass,
    mark_generator_state,
    must_keep_compiled,
    mutated_placeholders,
    note_updates,
    noted_updates,
    only_calls_graph,
    partition_function,
    returning_kept,
    running_backward,
    state_of_generator,
    static_input_indices,
    tables_of_hooks,
    with_hooks_on_gradient,
    without_autocast,
)
from dynamo_backends._torch_private.captured_symbols import CapturedSymbols, mark_dims
from dynamo_backends._torch_private.distributed import (
    cpu_backend,
    default_store,
    host_of,
    process_group,
)
from dynamo_backends._torch_private.dynamo import (
    captured_arguments,
    compile_id,
    dynamo_control_flow,
    dynamo_counters,
    hidden_from_dynamo,
    is_capturing,
    is_profiled,
    lookup_backend,
    raised_through_dynamo,
    same,
    trace_artifact,
    without_captures,
)
from dynamo_backends._torch_private.functorch import transforms_given, unwrapped
from dynamo_backends._torch_private.graphs import (
    captured_static_inputs,
    copy_captured,
    described_input_index,
    dynamo_input_index,
    dynamo_source_name,
    forward_of,
    function_name,
    has_side_effect,
    is_plain,
    is_tangent,
    lazy_graph_module,
    mutated_input_index,
    output_index,
    owner_index,
    updated_inputs,
    updated_owners,
)
from dynamo_backends._torch_private.inductor import (
    compile_decomposed_with_inductor,
    compile_frozen_with_inductor,
    compile_quantized_with_inductor,
    compile_step_with_inductor,
    compile_with_inductor,
    import_inductor,
    inductor_decompositions,
    mode_for_inductor,
    prepacked_convolution,
    register_channels_last_fallback,
)
from dynamo_backends._torch_private.inductor_compiler import (
    find_vectors,
    load_cpp,
    settings_for_casts,
)
from dynamo_backends._torch_private.lazy import (
    lazy_fallbacks,
    lazy_graph,
    lazy_id,
    lazy_run,
    lazy_sync,
    start_lazy_backend,
)
from dynamo_backends._torch_private.onnx import (
    onnx_call,
    onnx_opset_imports,
    onnx_placeholder,
    onnx_registry,
    promote_types,
)
from dynamo_backends._torch_private.operators import (
    ELEMENTWISE_PROMOTION,
    HigherOrderOperator,
    OpOverload,
    all_decompositions,
    all_operator_names,
    composite_names,
    core_aten_decompositions,
    core_decompositions,
    counts_flops,
    elementwise_dtypes,
    is_composite,
)
from dynamo_backends._torch_private.regions import (
    call_region,
    calls_graphs,
    compile_module,
    inline_regions,
    without_regions,
)
from dynamo_backends._torch_private.symbols import FreshSymbols
from dynamo_backends._torch_private.tensors import (
    FakeTensor,
    TensorProperties,
    bounds_of,
    bounds_within,
    concrete,
    ends_of_outputs,
    from_dlpack,
    has_storage,
    is_dense_on_cpu,
    is_functionalized,
    is_lazy,
    is_parameter,
    is_private,
    is_traceable_wrapper_subclass,
    is_traced,
    lazy_as,
    make_wrapper,
    mark_static,
    physical,
    plain_parts,
    return_and_correct_aliasing,
    set_data,
    size_bounds,
    size_function,
    storage_id,
    storage_users,
    surely,
    to_dlpack,
)
from dynamo_backends._torch_private.torchscript import (
    has_llvm,
    has_onednn_graph,
    jit,
    script_function,
    script_module,
    static_module,
    torchscript_fuser,
)
from dynamo_backends._torch_private.tracing import (
    FakeTensorMode,
    apart_from_compilation,
    as_if_captured,
    capture_seconds,
    compiling,
    disable_current_modes,
    functional_trace,
    functionalized,
    graph_being_traced,
    has_effects,
    keep_unused_draws,
    make_fx,
    mode_of,
    node_of,
    outside_of_captures,
    settings_of_tracing,
    tracing_a_step,
    tracing_apart,
)
