"""Matrix products.

nvFuser's `matmul` and `linear` compute in the operands' type, as torch's do, and round once.
"""

from dynamo_backends.nvfuser.dtypes import computing
from dynamo_backends.nvfuser.lowering.registry import Unsupported, lowers
from dynamo_backends.nvfuser.recorder import Number, Value

PRODUCTS = frozenset(
    f"aten.{name}"
    for name in ("mm.default", "bmm.default", "addmm.default", "addbmm.default", "addmv.default",
                 "mv.default", "dot.default")
)  # fmt: skip
"""The overloads that are matrix products."""


def _product(x: Value, y: Value, shape: tuple[int, ...]) -> Value:
    if not x.is_floating_point:
        raise Unsupported("products of integer matrices are left to eager")
    return x.recorder.tensor("matmul", (x, y), shape, x.dtype)


@lowers("mm.default")
def mm(x: Value, y: Value) -> Value:
    return _product(x, y, (x.shape[0], y.shape[1]))


@lowers("bmm.default")
def bmm(x: Value, y: Value) -> Value:
    return _product(x, y, (*x.shape[:2], y.shape[2]))


@lowers("addbmm.default")
def addbmm(bias: Value, x: Value, y: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    products = bmm(x, y)
    return _added(bias, products.cast(computing(products.dtype)).sum((0,)), beta, alpha)


@lowers("addmv.default")
def addmv(bias: Value, x: Value, vector: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    return _added(bias, mv(x, vector), beta, alpha)


@lowers("mv.default")
def mv(x: Value, vector: Value) -> Value:
    return _product(x, vector, x.shape[:1])


@lowers("dot.default")
def dot(x: Value, y: Value) -> Value:
    return _product(x, y, ())


@lowers("addmm.default")
def addmm(bias: Value, x: Value, y: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    shape = (x.shape[0], y.shape[1])
    if bias.shape == shape[1:] and beta == 1 and alpha == 1 and x.is_floating_point:
        # The bias is added before the halves are rounded, as in eager.
        arguments = (x, y.permute((1, 0)), bias)
        return x.recorder.tensor("linear", arguments, shape, x.dtype)
    return _added(bias, _product(x, y, shape), beta, alpha)


def _added(bias: Value, product: Value, beta: Number, alpha: Number) -> Value:
    kind = computing(product.dtype)
    product = product.cast(kind)
    if alpha != 1:
        product = product * alpha
    if beta == 0:
        return product
    bias = bias.cast(kind)
    return product + (bias if beta == 1 else bias * beta)
