"""The options of autotune, and the names of candidates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

from dynamo_backends.int8.options import Int8Options
from dynamo_backends.interface.errors import OptionError, did_you_mean
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.registry import get_backend, list_backends, third_party_backends

AUTOTUNE = "autotune"
EAGER = "eager"
SPLIT = "split"
USER_FUNCTION = "eager, as written"
"""Who takes a whole step when that is the user's function, not its captured graph."""

NOT_COMPILED = (EAGER, USER_FUNCTION)

_NAMED_ALONE = frozenset(
    {
        "inductor_max_autotune",
        "iree",
        "ltc",
        "ltc_trace",
        "nnc",
        "ofi",
        "onednn_graph",
        "static_runtime",
        "ts_trace",
        "tvm",
    }
)
"""Compete where the user names them: of all models that were measured (docs/measurements.md) none
was fastest on one of these, once all candidates had been tried."""

# Names under which vendors' packages bring to torch what is a backend of this package.
_OF_VENDORS: Mapping[str, str] = {"openvino": "ov"}

# torch's own, and the device type that they are for; None: any.
TORCH_BACKENDS: Mapping[str, str | None] = {"inductor": None, "cudagraphs": "cuda"}


def default_candidates(device_types: Sequence[str]) -> list[str]:
    """Returns the names of the candidates that compete if the user names none."""
    torchs = [n for n, kind in TORCH_BACKENDS.items() if kind is None or kind in device_types]
    names = [EAGER, *torchs, *list_backends(), *third_party_backends()]
    left_out = {AUTOTUNE, *_OF_VENDORS, *_NAMED_ALONE}
    return [n for n in names if n not in left_out and not _is_variant(n)]


def _is_variant(name: str) -> bool:
    """Returns whether another candidate runs the same code."""
    return name in list_backends() and bool(get_backend(name).same_as)


def check_names(names: Sequence[str], backend: str) -> None:
    """Raises if the option `candidates` names no known backend, or autotune itself.

    Raises:
        OptionError: A name is no backend's, or autotune's own.
    """
    if not names:
        return
    from dynamo_backends._torch_private.dynamo_control import torch_backends

    others = {*torch_backends(debugging=True), *third_party_backends()}
    known = sorted({EAGER, *list_backends(), *others} - {AUTOTUNE})
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            usual = sorted({EAGER, *TORCH_BACKENDS, *list_backends(), *third_party_backends()})
            usual.remove(AUTOTUNE)
            raise OptionError(
                f"option 'candidates' of {backend} names {name!r}, which is not a known "
                f"backend.{hint} Valid names: {', '.join(usual)}."
            )


@dataclass(frozen=True)
class AutotuneOptions(Int8Options):
    """The options of autotune; the fields of `Options` are passed on to candidates.

    `verify` changes nothing, since every candidate is verified. With `fallback="error"` only
    candidates that take a whole graph compete with eager.

    Attributes:
        candidates: Names of the backends to choose from: this package's, torch's, or those of
            other packages. Empty: those that are usable here, without those that were never the
            fastest (`default_candidates`). Eager always takes part.
        objective: "latency": the shortest time of a single call after a pause; "throughput": the
            shortest time per call when calls follow each other; "memory": the smallest growth of
            the process's memory (a slower candidate may win).
        budget_s: Time limit for tuning in seconds, shared by all graphs of this process with these
            options. If no candidates are named, one graph gets 8 to 30 of these seconds, depending
            on the time of a call in eager (`graph_budget.graph_limit_s`). Candidates with a low
            predicted speedup are tried last. The most promising candidate of the first graph is
            always tried; later graphs for which no time is left run in eager.
        precision: "float32" demands results as accurate as eager's. "bf16" also admits
            candidates that compute in bfloat16, if their results are as accurate as eager's under
            autocast, and their error at most a tenth of the size of the results
            (`verify.comparator.REDUCED_TOLERANCE`). "int8" also admits candidates that compute
            linear layers and convolutions in int8, or keep their weights so, if their results on
            held-out batches of `calibration` are within `tolerance`, and those on the real inputs,
            too (docs/int8.md). For inference on the CPU.
        isolate: Candidates that are first compiled and called in a separate process, so that a
            crash or a hang only excludes the candidate: "third-party" (backends of other packages),
            "all", or "off".
        trial_timeout_s: Seconds after which an isolated candidate is killed and excluded.
        mode: "wait": the first call tunes. "background": calls run in eager while another process
            tunes on copies of their inputs, and the winner takes over between two calls;
            `budget_s` are seconds of processors there (docs/autotune.md).
        first_call_s: With "background": maximum predicted compile time in seconds of a candidate
            that is compiled in the first call: the winner of a saved decision, or the most
            promising candidate.
    """

    candidates: tuple[str, ...] = ()
    objective: Literal["latency", "throughput", "memory"] = "latency"
    budget_s: float | int = 120
    precision: Literal["float32", "bf16", "int8"] = "float32"
    isolate: Literal["third-party", "all", "off"] = "third-party"
    trial_timeout_s: float | int = 120
    mode: Literal["wait", "background"] = "wait"
    first_call_s: float | int = 0

    @classmethod
    def parse(cls, given: Mapping[str, Any], backend: str) -> Self:
        """See `Options.parse`; also converts a list of `candidates` to a tuple."""
        given = dict(given)
        if isinstance(given.get("candidates"), list):
            given["candidates"] = tuple(given["candidates"])
        return super().parse(given, backend)

    def validate(self, backend: str) -> None:
        """See `Options.validate`."""
        super().validate(backend)
        super().refuse_background_compile(backend)
        for name in ("budget_s", "trial_timeout_s"):
            if not getattr(self, name) > 0:
                raise OptionError(
                    f"option {name!r} of {backend} must be more than 0 seconds, "
                    f"not {getattr(self, name)}."
                )
        if not self.first_call_s >= 0:
            raise OptionError(
                f"option 'first_call_s' of {backend} must be at least 0 seconds, "
                f"not {self.first_call_s}."
            )
        check_names(self.candidates, backend)
        if self.is_int8 and (self.mode != "wait" or self.isolate == "all"):
            raise OptionError(
                f"precision='int8' of {backend} validates candidates in this process, which holds "
                "the calibration batches; set mode='wait', and isolate='third-party' or 'off'."
            )

    def refuse_background_compile(self, who: str) -> None:
        """See `Options.refuse_background_compile`; also refuses `mode="background"`."""
        super().refuse_background_compile(who)
        if self.mode != "wait":
            raise OptionError(f"{who} tunes synchronously; mode must be 'wait', not {self.mode!r}.")

    def without_int8(self) -> "AutotuneOptions":
        """Returns a copy with precision float32 in place of int8; else the options."""
        if not self.is_int8:
            return self
        return replace(self, precision="float32", calibration=None, tolerance=None)

    def common_settings(self) -> dict[str, Any]:
        """Returns the fields of `Options` as a dict of settings for a candidate."""
        shared = {f.name: getattr(self, f.name) for f in fields(Options)}
        return {**shared, "verify": "off", "slow": "off"}
