"""Which ONNX operators the parser takes, with which types: onnx-tensorrt's docs/operators.md."""

from onnx import NodeProto, TensorProto

_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
_NUMBERS = _FLOATS | {TensorProto.INT32, TensorProto.INT64}
_ALL = _NUMBERS | {TensorProto.BOOL}
_HALVES = {TensorProto.FLOAT, TensorProto.FLOAT16}

_TABLE = (
    ("Acos Acosh Asin Asinh Atan Atanh AveragePool BatchNormalization Ceil Celu Clip Conv"
     " ConvTranspose Cos Cosh CumSum Dropout Einsum Elu Erf Exp Floor Gemm GlobalAveragePool"
     " GlobalLpPool GlobalMaxPool GroupNormalization HardSigmoid HardSwish Hardmax"
     " InstanceNormalization IsInf LayerNormalization LeakyRelu Log LogSoftmax LRN LpNormalization"
     " LpPool MatMul MaxPool MeanVarianceNormalization PRelu Reciprocal Resize RMSNormalization"
     " RotaryEmbedding Round Selu Sigmoid Sin Sinh Softmax Softplus Softsign Sqrt Tan Tanh"
     " ThresholdedRelu", _FLOATS),
    ("Abs Add ArgMax ArgMin DepthToSpace Div Equal Gelu Greater GreaterOrEqual IsNaN Less"
     " LessOrEqual Max Mean Min Mod Mul Neg Pad Pow Range ReduceL1 ReduceL2 ReduceLogSum"
     " ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu"
     " ScatterElements ScatterND Shrink Sign SpaceToDepth Sub Sum TopK", _NUMBERS),
    ("Cast CastLike Concat Constant ConstantOfShape Expand EyeLike Flatten Gather GatherElements"
     " GatherND Identity If Loop OneHot Reshape ReverseSequence Shape Size Slice Split Squeeze Tile"
     " Transpose Trilu Unsqueeze Where", _ALL),
    ("DeformConv GridSample Mish NonMaxSuppression NonZero RoiAlign", _HALVES),
    ("And Not Or Xor", {TensorProto.BOOL}),
)  # fmt: skip

SUPPORTED = {name: types for names, types in _TABLE for name in names.split()}

_FIRST_OUTPUT_ONLY = {"LayerNormalization", "MaxPool"}


def refused_type(node: NodeProto, element_type: int | None) -> str | None:
    """What the static check complains of; None if nothing."""
    if node.op_type not in SUPPORTED:
        return f"no importer registered for op: {node.op_type}"
    if element_type is not None and element_type not in SUPPORTED[node.op_type]:
        name = TensorProto.DataType.Name(element_type)
        return f"{node.op_type} does not support the type {name}"
    return None


def restriction(node: NodeProto, rank: int | None) -> str | None:
    """What importing complains of, which hides everything after it; None if nothing."""
    attributes = {a.name: a for a in node.attribute}
    if node.op_type in _FIRST_OUTPUT_ONLY and len([o for o in node.output if o]) > 1:
        return f"only the first output of {node.op_type} is supported"
    if node.op_type in ("MaxPool", "AveragePool") and rank is not None and rank not in (4, 5):
        return "2D or 3D pooling only"
    dilations = attributes["dilations"].ints if "dilations" in attributes else ()
    if node.op_type in ("MaxPool", "AveragePool") and {*dilations} - {1}:
        return "dilations must be empty or all ones"
    reduction = attributes["reduction"].s if "reduction" in attributes else b""
    if node.op_type == "ScatterND" and reduction not in (b"", b"none"):
        return "reduction other than none is not supported"
    if node.op_type == "TopK" and "sorted" in attributes and attributes["sorted"].i != 1:
        return "sorted must be 1"
    return None
