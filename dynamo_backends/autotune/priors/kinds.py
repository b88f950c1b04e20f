"""Kinds of calls, by the last part of a function's name: "linear", "aten.mm", "conv2d"."""

from collections.abc import Callable, Mapping
from typing import Any

_WORDS: Mapping[str, str] = {
    "convolution": "convolution conv1d conv2d conv3d _convolution conv_transpose1d conv_transpose2d"
    " conv_transpose3d convolution_overrideable",
    "product": "linear matmul mm bmm addmm baddbmm einsum __matmul__ dot mv addmv inner tensordot",
    "attention": "scaled_dot_product_attention multi_head_attention_forward"
    " _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention"
    " _scaled_dot_product_flash_attention",
    "recurrent": "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell",
    "norm": "layer_norm batch_norm group_norm instance_norm rms_norm native_layer_norm"
    " native_group_norm _native_batch_norm_legit _native_batch_norm_legit_no_training"
    " native_batch_norm normalize",
    "softmax": "softmax _softmax log_softmax _log_softmax",
    "layout": "view reshape permute transpose t contiguous flatten unsqueeze squeeze expand cat"
    " stack split chunk unbind getitem slice select clone roll pad constant_pad_nd movedim"
    " expand_as view_as repeat unflatten",
    "indexing": "embedding index gather scatter index_select take embedding_bag index_put"
    " scatter_add",
    "pool": "max_pool2d avg_pool2d adaptive_avg_pool2d max_pool2d_with_indices mean sum amax"
    " adaptive_max_pool2d max_pool1d avg_pool1d interpolate",
}  # fmt: skip

_KINDS = {word: kind for kind, words in _WORDS.items() for word in words.split()}

KINDS = (*_WORDS, "pointwise")


def name_of(target: Callable[..., Any] | str) -> str:
    """A function's name without its module, its overload, and the marks of in-place forms."""
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    packet = getattr(target, "overloadpacket", None)
    name = packet.__name__ if packet is not None else name
    short = name.removesuffix("_") if not name.endswith("__") else name
    return short.removeprefix("_inplace_")


def kind_of(target: Callable[..., Any] | str) -> str:
    """One of `KINDS`; "pointwise" for what is none of the others."""
    return _KINDS.get(name_of(target), "pointwise")
