"""Collects every private torch API that this package uses, with hooks of Dynamo beside them.

Each module lists what it reaches for with the torch versions for which it was checked. "2.11+"
stands for 2.13.0, with which every change is tested, and for 2.11.0, 2.12.1, 2.14.1 and 2.15.0:
with 2.12.1 and 2.15.0 all tests ran once, with each of them a share (docs/versions.md), and the
code was mended where they failed. "2.13*" stands for 2.13.0, 2.11.0 and 2.15.0.

Code elsewhere imports these names from here and never from torch's insides. `watching` and
`control`, which steer Dynamo itself, are imported apart.
"""

# ruff: noqa: F401 - all of these are names for the rest of the package

from dynamo_backends._torch_private import amp_scaling
from dynamo_backends._torch_private.aot_graph_metadata import (
    captured_static_inputs,
    copy_captured,
    dynamo_input_index,
    dynamo_source_name,
    function_name,
    generated_forward,
    has_side_effect,
    is_dynamo_input,
    is_tangent,
    lazy_graph_module,
    mutated_dynamo_inputs,
    mutated_input_index,
    output_index,
    updated_inputs,
    view_base_input_index,
    wrapper_input_index,
)
from dynamo_backends._torch_private.aoti import (
    SharedLibrary,
    compile_ahead,
    compute_size,
    open_library,
)
from dynamo_backends._torch_private.autograd import (
    after_backward,
    annotate_input_mutations,
    annotated_generator_state,
    annotated_input_mutations,
    aot_autograd,
    aot_cache_is_enabled,
    backward_pass_number,
    checkpoint_rng_operators,
    clear_donated_buffers,
    divide_by_min_cut,
    filter_hooked_tensors,
    hooks_on_gradient,
    is_autocast_on,
    is_of_backward,
    mark_as_backward,
    mark_backward_pass,
    mark_generator_state,
    must_be_serializable,
    mutated_placeholders,
    needs_no_runtime_wrapper,
    partition_function,
    running_backward_node,
    static_input_indices,
    tables_of_hooks,
    tagging_cache_key,
    without_autocast,
    wrap_for_aot_compile,
    wrap_serializable_compiler,
)
from dynamo_backends._torch_private.captured_symbols import CapturedSymbols, mark_dims
from dynamo_backends._torch_private.distributed import (
    cpu_backend,
    default_store,
    host_of,
    process_group,
)
from dynamo_backends._torch_private.dynamo import (
    blocking_other_captures,
    captured_argument_names,
    compile_id,
    dynamo_control_exceptions,
    dynamo_counters,
    hidden_from_dynamo,
    is_capturing,
    is_profiled,
    lookup_backend,
    make_dynamo_passing_error,
    meets_benchmark_accuracy,
    trace_artifact,
)
from dynamo_backends._torch_private.functorch import substituting_in_transforms, unwrapped
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
    load_cpp,
    preset_vector_isa,
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
    add_onnx_call,
    add_onnx_input,
    declare_onnx_opsets,
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
from dynamo_backends._torch_private.step_hooks import (
    accumulate_grad_node,
    count_registrations,
    exclude_hook_registrations,
    global_optimizer_hooks,
    hooks_of_node,
    is_in_ddp_forward,
    keep_node_hooks,
    saved_tensors_hooks,
)
from dynamo_backends._torch_private.symbols import FreshSymbols
from dynamo_backends._torch_private.tensors import (
    FakeTensor,
    TensorProperties,
    apply_conj_neg_bits,
    bounds_of,
    bounds_within,
    classify_aot_outputs,
    concretize_number,
    flatten_wrapper,
    from_dlpack,
    has_conj_or_neg_bit,
    has_storage,
    is_dense_on_cpu,
    is_functionalized,
    is_parameter,
    is_sole_storage_owner,
    is_statically_true,
    is_traceable_wrapper_subclass,
    is_tracing_wrapper,
    make_wrapper,
    mark_static,
    return_and_correct_aliasing,
    set_data,
    size_bounds,
    size_function,
    storage_id,
    storage_users,
    strip_conj_neg_bits,
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
    capture_seconds,
    disable_current_modes,
    entering_tracing_context,
    find_fake_mode,
    functional_trace,
    functionalize_graph,
    graph_being_traced,
    has_effects,
    keeping_unused_draws,
    make_fx,
    node_of,
    setting_is_compiling,
    settings_of_tracing,
    suspending_compile_metrics,
    suspending_tracing_context,
    tracing_a_step,
    tracing_thread_locally,
)
