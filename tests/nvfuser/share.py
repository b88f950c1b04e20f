"""Which of PyTorch's operator database is what nvFuser is for."""

from dynamo_backends._torch_private.testing import (
    BinaryUfuncInfo,
    OpInfo,
    ReductionOpInfo,
    UnaryUfuncInfo,
)
from dynamo_backends.conformance.operators import database

DTYPES = tuple(d for d in database.DTYPES if not d.is_complex)  # nvFuser computes with them

IN_WORDS = "Every elementwise, reducing and normalising operator, every view and matrix product"

_CLASSES = (BinaryUfuncInfo, ReductionOpInfo, UnaryUfuncInfo)
_NAMES = """
_batch_norm_with_update _chunk_cat _native_batch_norm_legit _softmax_backward_data addbmm
addcdiv addcmul addmm addmv addr alias_copy allclose aminmax arange atleast_1d atleast_2d
atleast_3d baddbmm block_diag bmm broadcast_tensors broadcast_to cat chunk clamp clone
column_stack constant_pad_nd contiguous cov cross diff dist dot dsplit dstack einsum equal
expand expand_as expand_copy eye flatten full full_like gradient H hsplit hstack inner kron lerp
linalg.cross linalg.matrix_norm linalg.multi_dot linalg.norm linalg.vecdot linspace log_softmax
logaddexp2 logspace logsumexp mH mT masked.log_softmax masked.logaddexp masked.normalize
masked.softmax masked.softmin masked_fill matmul max meshgrid min mm movedim mv narrow
native_batch_norm native_dropout_backward native_group_norm native_layer_norm new_full new_ones
new_zeros norm ones ones_like outer permute permute_copy ravel renorm repeat reshape reshape_as
roll scalar_tensor select select_scatter slice slice_scatter softmax split split_with_sizes
split_with_sizes_copy squeeze squeeze_copy stack std_mean sum_to_size t T t_copy tensor_split
tensordot tile to torch.ops.aten._safe_softmax.default trace transpose transpose_copy trapezoid
trapz tril triu unbind unbind_copy unflatten unsafe_chunk unsafe_split unsqueeze unsqueeze_copy
var_mean vdot view view_as view_copy vsplit vstack where zero_ zeros zeros_like __getitem__
__rmatmul__
"""

_LAYERS = """
batch_norm bilinear binary_cross_entropy binary_cross_entropy_with_logits channel_shuffle
cosine_embedding_loss cosine_similarity gaussian_nll_loss gelu glu group_norm hardswish
hinge_embedding_loss huber_loss instance_norm kl_div l1_loss layer_norm leaky_relu linear
local_response_norm margin_ranking_loss mse_loss multilabel_soft_margin_loss normalize pad
pairwise_distance pixel_shuffle pixel_unshuffle poisson_nll_loss rms_norm
scaled_dot_product_attention smooth_l1_loss soft_margin_loss softmin triplet_margin_loss
triplet_margin_with_distance_loss
"""


def is_in(op: OpInfo) -> bool:
    """Whether an operator is among them."""
    name = op.name.removeprefix("nn.functional.")
    known = (_LAYERS if name != op.name else _NAMES).split()
    return isinstance(op, _CLASSES) or name in known
