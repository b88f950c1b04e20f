"""The operators of random graphs: those that compilers rewrite, alone or in pairs."""

from collections.abc import Mapping
from typing import NamedTuple


class Operator(NamedTuple):
    """A call in a random graph.

    Attributes:
        template: Python. `{x}` is a value; `{y}` one of the same dtype whose shape broadcasts to
            that of x; `{b}` a boolean of x's shape; `{c}` a float; `{k}` an integer other than 0
            and -1; `{n}` a shift count; `{d}` a dimension of x; `{i}` and `{j}` positions along the
            last dimension, `{i}` a vector that may be negative, `{j}` of x's shape, from 0.
        takes: The kinds of x: "f" float32 and float64, "h" float16 and bfloat16, "i" integers,
            "b" bool.
        inverses: Templates that undo it, or that compilers merge with it; `{y}`, `{c}`, `{k}` and
            `{d}` are those of this call.
        dims: Least number of x's dimensions.
        moves: Whether results are elements of operands, unchanged.
    """

    template: str
    takes: str
    inverses: tuple[str, ...] = ()
    dims: int = 0
    moves: bool = False


def _all(takes: str, *templates: str, dims: int = 0, moves: bool = False) -> tuple[Operator, ...]:
    return tuple(Operator(text, takes, dims=dims, moves=moves) for text in templates)


OPERATORS: Mapping[str, tuple[Operator, ...]] = {
    "constants": (
        Operator("{x} + {c}", "fh", ("{x} - {c}", "{x} + {c}", "{c} - {x}")),
        Operator("{x} - {c}", "fh", ("{x} + {c}", "{x} - {c}")),
        Operator("{c} - {x}", "f", ("{c} - {x}", "{x} - {c}")),
        Operator("{x} * {c}", "fh", ("{x} / {c}", "{x} * {c}", "{x} + {c}")),
        Operator("{x} / {c}", "f", ("{x} * {c}", "{x} / {c}")),
        Operator("{c} / {x}", "f", ("{c} / {x}", "{x} * {c}")),
        *_all("f", "{x} * 0.0", "{x} * 1.0", "{x} + 0.0", "{x} - 0.0", "0.0 - {x}", "{x} / 1.0"),
        *_all("f", "{x} * -1.0", "{x} ** 2", "{x} ** 3", "{x} ** 0.5", "{x} ** -1", "{x} ** -0.5"),
        *_all("f", "{x} ** 0", "{x} ** 1", "{x} ** {c}", "1.5 ** {x}", "0.0 / {x}"),
    ),
    "two values": (
        Operator("{x} + {y}", "f", ("{x} - {y}", "{x} + {y}")),
        Operator("{x} - {y}", "f", ("{x} + {y}", "{y} - {x}")),
        Operator("{x} * {y}", "f", ("{x} / {y}", "{x} * {y}", "{x} + {y}")),
        Operator("{x} / {y}", "f", ("{x} * {y}", "{y} / {x}")),
        *_all("f", "{x} - {x}", "{x} / {x}", "{x} + {x}", "{x} * {x}", "torch.lerp({x}, {y}, 0.3)"),
        *_all("f", "torch.addcmul({x}, {y}, {y})", "torch.hypot({x}, {y})",
            "torch.atan2({x}, {y})"),
        *_all("f", "torch.logaddexp({x}, {y})", "torch.xlogy({x}, {y})",
            "torch.copysign({x}, {y})"),
        *_all("f", "torch.remainder({x}, {y}.abs() + 0.5)",
            "torch.fmod({x}, {y}.abs() + 0.5)", "{x} ** {y}"),
    ),
    "inverse pairs": (
        Operator("{x}.exp()", "f", ("{x}.log()", "{x} * {x}", "{x}.reciprocal()", "{x}.log1p()")),
        Operator("{x}.log()", "f", ("{x}.exp()", "-{x}")),
        Operator("{x}.expm1()", "f", ("{x}.log1p()",)),
        Operator("{x}.log1p()", "f", ("{x}.expm1()",)),
        Operator("{x}.exp2()", "f", ("{x}.log2()",)),
        Operator("{x}.log2()", "f", ("{x}.exp2()",)),
        Operator("{x}.sqrt()", "f", ("{x}.square()", "{x} * {x}", "{x}.reciprocal()")),
        Operator("{x}.square()", "f", ("{x}.sqrt()", "{x}.abs()")),
        Operator("{x} * {x}", "f", ("{x}.sqrt()", "{x}.rsqrt()")),
        Operator("{x}.rsqrt()", "f", ("{x}.square()", "{x}.reciprocal()")),
        Operator("{x}.reciprocal()", "f", ("{x}.reciprocal()", "{x}.abs()")),
        Operator("-{x}", "fhi", ("-{x}", "{x}.abs()", "{x}.relu()")),
        Operator("{x}.abs()", "fhi", ("{x}.abs()", "{x}.sqrt()", "{x}.log()")),
        Operator("{x}.tanh()", "f", ("{x}.atanh()",)),
        Operator("{x}.sigmoid()", "f", ("{x}.logit()", "{x}.log()", "1.0 - {x}")),
        Operator("{x}.sin()", "f", ("{x}.asin()",)),
        Operator("{x}.cos()", "f", ("{x}.acos()", "{x} * {x}")),
        Operator("{x}.sinh()", "f", ("{x}.asinh()",)),
        Operator("{x}.tan()", "f", ("{x}.atan()",)),
        Operator("{x}.erf()", "f", ("{x}.erfinv()", "1.0 - {x}")),
        Operator("{x}.erfc()", "f", ("{x}.log()", "1.0 - {x}")),
    ),
    "activations": (
        *_all("fh", "{x}.relu()", "F.relu6({x})", "F.silu({x})", "F.gelu({x})"),
        *_all("f", "F.gelu({x}, approximate='tanh')", "F.softplus({x})", "F.logsigmoid({x})"),
        *_all("f", "F.elu({x})", "F.celu({x})", "F.selu({x})", "F.hardswish({x})", "F.mish({x})"),
        *_all("f", "F.hardsigmoid({x})", "F.hardtanh({x})", "F.leaky_relu({x})", "F.softsign({x})"),
        *_all("f", "F.threshold({x}, 0.5, -1.0)", "F.softshrink({x})", "F.hardshrink({x})"),
        *_all("f", "F.tanhshrink({x})", "{x}.sgn()", "{x}.sinc()", "F.glu({x}, {d})"),
    ),
    "casts": (
        Operator("{x}.half()", "f", ("{x}.float()",) * 3),
        Operator("{x}.bfloat16()", "f", ("{x}.float()",) * 3),
        Operator("{x}.double()", "f", ("{x}.float()",)),
        Operator("{x}.float()", "hib", ("{x}.half()", "{x}.bool()"), moves=True),
        Operator("{x}.nan_to_num(0.0).clamp(-1e4, 1e4).int()", "f", ("{x}.float()",)),
        Operator("{x}.int()", "i", ("{x}.long()", "{x}.to(torch.uint8)")),
        Operator("{x}.to(torch.int8)", "i", ("{x}.int()", "{x}.to(torch.uint8)")),
        Operator("{x}.to(torch.uint8)", "i", ("{x}.int()", "{x}.to(torch.int8)")),
        Operator("{x}.to(torch.int16)", "i", ("{x}.int()", "{x}.long()")),
        Operator("{x}.long()", "ib", ("{x}.int()", "{x}.float()")),
        Operator("{x}.bool()", "fi", ("{x}.float()", "~{x}", "{x}.int()")),
    ),
    "roundings": _all("f", "{x}.floor()", "{x}.ceil()", "{x}.round()", "{x}.trunc()", "{x}.frac()"),
    "norms": (
        *_all("f", "F.layer_norm({x}, {x}.shape[-1:])", "F.rms_norm({x}, {x}.shape[-1:])", dims=1),
        *_all("f", "F.normalize({x}, dim={d})", "F.normalize({x}, p=1.0, dim={d})", dims=1),
        *_all("f", "{x} - {x}.mean({d}, True)", "{x} / {x}.norm(dim={d}, keepdim=True)", dims=1),
        *_all("f", "{x} / {x}.sum({d}, True)", "{x} * ({x} * {x}).mean({d}, True).rsqrt()", dims=1),
        *_all("f", "F.batch_norm({x}, None, None, training=True)", dims=2),
        *_all("f", "F.instance_norm({x})", "F.group_norm({x}, 1)", dims=3),
    ),
    "softmax": (
        Operator("{x}.softmax({d})", "f", ("{x}.log()", "{x}.sum({d})"), dims=1),
        Operator("{x}.log_softmax({d})", "f", ("{x}.exp()", "-{x}"), dims=1),
        Operator("{x}.logsumexp({d}, True)", "f", ("{x}.exp()",), dims=1),
        *_all("f", "F.softmin({x}, {d})", "{x} - {x}.amax({d}, True)", dims=1),
        *_all("f", "{x} - {x}.logsumexp({d}, True)", "{x}.logcumsumexp({d})", dims=1),
        *_all("f", "{x}.exp() / {x}.exp().sum({d}, True)", "{x}.exp().sum({d}, True).log()",
            dims=1),
    ),
    "comparisons": (
        *_all("f", "{x} > {c}", "{x} >= {c}", "{x} < {c}", "{x} <= {c}", "{x} == {c}",
            "{x} != {c}"),
        *_all("fi", "{x} > {y}", "{x} <= {y}", "{x} == {y}", "{x} != {y}", "{x} == {x}",
            "{x} != {x}"),
        *_all("i", "{x} > {k}", "{x} <= {k}", "{x} == {k}", "({x} + {k}) > {x}"),
        *_all("f", "{x}.isnan()", "{x}.isinf()", "{x}.isfinite()", "{x}.signbit()",
            "({x} + 1) > {x}"),
        *_all("b", "~{x}", "{x} & {y}", "{x} | {y}", "{x} ^ {y}", "{x}.any({d})", "{x}.all({d})"),
    ),
    "selects": (
        *_all("fhi", "torch.where({b}, {x}, {y})", "torch.where({x} > {y}, {x}, {y})", moves=True),
        *_all("fhi", "torch.maximum({x}, {y})", "torch.minimum({x}, {y})", moves=True),
        *_all("f", "torch.where({x} > {c}, {x}, {c})", "torch.where({x} == {x}, {x}, 0.0)",
            moves=True),
        *_all("f", "torch.where({b}, {x}, 0.0)", "{x}.masked_fill({b}, {c})", moves=True),
        *_all("f", "torch.fmax({x}, {y})", "torch.fmin({x}, {y})", "{x}.nan_to_num()", moves=True),
        *_all("f", "{x}.nan_to_num(0.0, 1.0, -1.0)", "{x}.clamp(min={c})", moves=True),
        Operator("{x}.clamp(max={c})", "f", ("{x}.clamp(min={c})",), moves=True),
        Operator("{x}.clamp(-1.0, 1.0)", "f", ("{x}.asin()", "{x}.clamp(-2.0, 2.0)"), moves=True),
        *_all("i", "{x}.clamp(min={k})", "torch.where({b}, {x}, 0)", moves=True),
    ),
    "integers": (
        Operator("{x} + {k}", "i", ("{x} - {k}", "{x} // {k}")),
        Operator("{x} - {k}", "i", ("{x} + {k}",)),
        Operator("{x} * {k}", "i", ("{x} // {k}", "{x} % {k}",
            "torch.div({x}, {k}, rounding_mode='trunc')")),
        Operator("{x} // {k}", "i", ("{x} * {k}",)),
        Operator("{x} << {n}", "i", ("{x} >> {n}",)),
        Operator("{x} >> {n}", "i", ("{x} << {n}",)),
        Operator("~{x}", "i", ("~{x}", "{x} + 1")),
        Operator("{x} ^ {y}", "i", ("{x} ^ {y}",)),
        *_all("i", "{x} % {k}", "torch.fmod({x}, {k})",
            "torch.div({x}, {k}, rounding_mode='trunc')"),
        *_all("i", "{x} + {y}", "{x} - {y}", "{x} * {y}", "{x} & {y}", "{x} | {y}", "{x} & {k}"),
        *_all("i", "{x} - {x}", "{x} * {x}", "{x} * 0", "{x} * 2", "{x} / {k}", "{x}.sign()"),
        *_all("i", "{x}.prod({d})", "{x}.sum({d})", "{x}.cumsum({d})", "{x}.prod()", dims=1),
    ),
    "indexing": (
        *_all("fib", "{x}[..., 1:]", "{x}[..., ::2]", "{x}[..., [0, -1]]", "{x}[..., -1]", dims=1,
            moves=True),
        Operator("{x}.flip({d})", "fi", ("{x}.flip({d})",), dims=1, moves=True),
        Operator("{x}.roll(1, {d})", "fi", ("{x}.roll(-1, {d})",), dims=1, moves=True),
        *_all("fib", "{x}[..., {i}]", "{x}.index_select(-1, {i} % {x}.shape[-1])", dims=1,
            moves=True),
        *_all("fi", "{x}.gather(-1, {j})", "{x}.take_along_dim({j}, -1)", dims=1, moves=True),
        *_all("f", "torch.zeros_like({x}).scatter(-1, {j}, 2.0)", dims=1, moves=True),
        *_all("f", "{x}.scatter_add(-1, {j}, {x})", dims=1),
        *_all("fi", "{x}.tril()", "{x}.triu()", "{x}.diagonal(0, -2, -1)", dims=2, moves=True),
        *_all("f", "{x}.sort({d}).values", "{x}.topk(2).values", dims=1, moves=True),
    ),
    "reductions": (
        Operator("{x}.sum({d}, True)", "f", ("{x} / 4.0", "{x}.log()"), dims=1),
        *_all("f", "{x}.sum({d})", "{x}.mean({d})", "{x}.mean({d}, True)", "{x}.sum()", dims=1),
        *_all("f", "{x}.prod({d})", "{x}.var({d})", "{x}.std({d})", "{x}.norm(dim={d})", dims=1),
        *_all("fi", "{x}.amax({d})", "{x}.amin({d})", "{x}.max({d}).values", dims=1, moves=True),
        *_all("f", "{x}.cumsum({d})", "{x}.mean()", "{x}.norm(p=1, dim={d})",
            "{x}.var({d}, correction=0)", dims=1),
        *_all("f", "{x}.argmax({d})", "{x}.argmin({d})", "{x}.count_nonzero({d})", dims=1),
        *_all("b", "{x}.sum({d})", "{x}.float().mean({d})", dims=1),
        *_all("f", "F.max_pool1d({x}, 2)", "F.avg_pool1d({x}, 2)", dims=2),
        *_all("f", "{x} @ {x}.transpose(-1, -2)", "torch.einsum('...i,...i->...', {x}, {y})",
            dims=2),
    ),
    "reshapes": (
        Operator("{x}.transpose(-1, -2)", "fib", ("{x}.transpose(-1, -2)",), dims=2, moves=True),
        Operator("{x}.unsqueeze({d})", "fib", ("{x}.squeeze({d})", "{x}.sum({d})"), dims=1,
            moves=True),
        *_all("fib", "{x}.reshape(-1)", "{x}.flatten()", "{x}.reshape(-1, 2)", dims=1, moves=True),
        *_all("fi", "torch.cat([{x}, {y}], {d})", "torch.stack([{x}, {x}])", dims=1, moves=True),
        *_all("fib", "{x}.unsqueeze(0).expand(3, *{x}.shape)", "{x}.movedim(0, -1)", dims=1,
            moves=True),
        *_all("f", "F.pad({x}, (1, 2))", "F.pad({x}, (1, 1), value=-1e30)", dims=1, moves=True),
    ),
}  # fmt: skip
"""By subject; each is as likely as the others."""

FLOATS = ("0.5", "2.0", "3.0", "-1.0", "-0.5", "0.1", "10.0", "1e-05", "100.0", "20.0", "88.0",
          "1000.0", "65504.0", "12582912.0", "16777216.0", "1e10", "1e-10", "1e20", "1e-20",
          "1e30", "1e-30", "1.0", "0.0")  # fmt: skip
INTEGERS = ("1", "2", "3", "-3", "7", "100", "128", "255", "-2", "16")
SHIFTS = ("0", "1", "3", "7", "31", "33")

EXACT = frozenset(
    (
        "{x} + {c}", "{x} - {c}", "{c} - {x}", "{x} + {y}", "{x} - {y}", "{y} - {x}", "{x} + {x}",
        "{x} - {x}", "{x} * 0.0", "{x} * 1.0", "{x} + 0.0", "{x} - 0.0", "0.0 - {x}", "{x} / 1.0",
        "{x} * -1.0", "-{x}", "{x}.abs()", "{x}.relu()", "{x}.half()", "{x}.bfloat16()",
        "{x}.double()", "{x}.floor()", "{x}.ceil()", "{x}.round()", "{x}.trunc()",
        *(row.template for rows in OPERATORS.values() for row in rows if row.moves),
        *(row.template for row in OPERATORS["integers"]),
        *(row.template for row in OPERATORS["comparisons"]),
    )
)  # fmt: skip
"""Templates of which IEEE 754, or the arithmetic of integers, leaves a backend one result."""
