"""What quantizes, beside the vendors' own packages: optional, and named where it is missing."""

import platform
from collections.abc import Mapping

from dynamo_backends.interface.errors import BackendUnavailableError
from dynamo_backends.interface.packages import missing
from dynamo_backends.runtime.processor import instruction_sets

INSTALL = "pip install 'dynamo-backends[int8]'"

NNCF: Mapping[str, str] = {"nncf": "nncf"}
TORCHAO: Mapping[str, str] = {"torchao": "torchao"}
"""Modules, each with the package on the index that has it."""


def require(packages: Mapping[str, str], backend: str) -> None:
    """Checks that a quantizer is installed.

    Raises:
        BackendUnavailableError: It is not; the text says what to run.
    """
    if reason := missing(packages):
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
    return not any("vnni" in name for name in instruction_sets())
