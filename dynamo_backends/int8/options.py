"""The options of backends that compute in int8, and the packages that quantize."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from dynamo_backends.int8 import calibration as batches
from dynamo_backends.int8 import tolerance as bounds
from dynamo_backends.int8.calibration import Calibration
from dynamo_backends.int8.tolerance import Tolerance
from dynamo_backends.interface.errors import BackendUnavailableError, CompileError, OptionError
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.packages import describe_missing
from dynamo_backends.runtime.cpu_info import cpu_flags

if TYPE_CHECKING:
    from dynamo_backends.graph.graph import Graph

CALIBRATED, DYNAMIC, WEIGHTS = "int8", "int8-dynamic", "int8-weights"
"""Values of `precision`: scales of activations by calibration, at each call, or none at all."""


@dataclass(frozen=True)
class Int8Options(Options):
    """The options of `precision="int8"` and its kinds, besides those of every backend.

    Attributes:
        calibration: Batches of the model's inputs, at least two: each one a dict by the names of
            its arguments, a tuple in their order, or a tensor. Every third batch (of two, the last
            one) is held out for validation.
        tolerance: How far results may differ from eager's: {"cosine": 0.99}, {"relative": 0.05}, or
            {metric: lowest value}, where metric is a function of eager's outputs and the results
            (two lists) of a batch.
    """

    calibration: Calibration | None = None
    tolerance: Tolerance | None = None

    @property
    def is_int8(self) -> bool:
        """Returns whether anything is to be computed in int8."""
        return str(getattr(self, "precision", "")).startswith("int8")

    @property
    def verifies_whole_graph(self) -> bool:
        """See `Options.verifies_whole_graph`."""
        return self.is_int8

    @classmethod
    def parse(cls, given: Mapping[str, Any], backend: str) -> Self:
        """See `Options.parse`; batches and bounds are as a user writes them."""
        given = dict(given)
        if given.get("calibration") is not None:
            given["calibration"] = Calibration.parse(given["calibration"], backend)
        if given.get("tolerance") is not None:
            given["tolerance"] = Tolerance.parse(given["tolerance"], backend)
        return super().parse(given, backend)

    def validate(self, backend: str) -> None:
        """See `Options.validate`."""
        super().validate(backend)
        if not self.is_int8:
            for name in ("calibration", "tolerance"):
                if getattr(self, name) is not None:
                    raise OptionError(
                        f"option {name!r} of {backend} requires precision='int8'. Set precision, "
                        "or remove the option."
                    )
            return
        asked = f"precision={getattr(self, 'precision', '')!r} of {backend}"
        if self.tolerance is None:
            raise OptionError(
                f"{asked} changes results, so it needs a tolerance: give {bounds.HOW}."
            )
        if self.calibration is None:
            raise OptionError(
                f"{asked} is validated on batches of real inputs: give {batches.HOW}."
            )
        if self.freezing == "off":
            raise OptionError(
                f"{asked} requires frozen weights; set freezing to 'probe' or 'strict', not 'off'."
            )
        if self.while_compiling != "wait":
            raise OptionError(
                f"{asked} calibrates in the first call; while_compiling must be 'wait', "
                f"not {self.while_compiling!r}."
            )

    def require_dynamo_capture(self, who: str) -> None:
        """See `Options.require_dynamo_capture`."""
        if self.is_int8:
            raise OptionError(
                f"{who} does not support precision='int8', which is for inference with "
                "torch.compile; use 'float32'."
            )

    def refuse_gradients(self, backend: str) -> None:
        """Refuses graphs that are differentiated, if anything is to be computed in int8.

        Raises:
            OptionError: Something is.
        """
        if self.is_int8:
            raise OptionError(
                f"precision='int8' of {backend} supports inference only, but gradients are "
                "enabled. Call the model under torch.no_grad() or torch.inference_mode()."
            )

    def validate_graph(self, graph: "Graph", backend: str) -> None:
        """See `Options.validate_graph`: inference that updates nothing."""
        super().validate_graph(graph, backend)
        if not self.is_int8:
            return
        if graph.kind != "inference":
            self.refuse_gradients(backend)
        if graph.updates:
            raise CompileError(
                "the model updates an input or buffer in place, so it cannot be run on calibration "
                "batches; call model.eval() first"
            )


INSTALL = "pip install 'dynamo-backends[int8]'"

NNCF: Mapping[str, str] = {"nncf": "nncf"}
TORCHAO: Mapping[str, str] = {"torchao": "torchao"}
"""Modules, each with the package on the index that has it."""


def require_quantizer(packages: Mapping[str, str], backend: str) -> None:
    """Raises `BackendUnavailableError` unless a quantizer is installed.

    Raises:
        BackendUnavailableError: It is not; the text says what to run.
    """
    if reason := describe_missing(packages):
        raise BackendUnavailableError(
            f"precision='int8' of {backend} needs a quantizer, and {reason}; run: {INSTALL}"
        )


def saturates() -> bool:
    """Returns whether sums of two products of 8-bit integers saturate in 16 bits here.

    Processors of the x86 family do that without VNNI (`vpmaddubsw`), so weights may have 7 bits
    there. Where the system does not name instruction sets, that is assumed.
    """
    if platform.machine().lower() not in ("x86_64", "amd64", "i686"):
        return False
    return not any("vnni" in name for name in cpu_flags())
