"""Features of a processor, from what a decision notes of the machine that it was made on."""

import math
from collections.abc import Mapping
from typing import Any

# The level of instructions (see `runtime.processor`): what each has, as far as kernels differ.
_LEVELS: Mapping[str, Mapping[str, float]] = {
    "avx2": {"avx2": 1},
    "avx2_vnni": {"avx2": 1, "vnni": 1},
    "avx512_core": {"avx2": 1, "avx512": 1},
    "avx512_core_vnni": {"avx2": 1, "avx512": 1, "vnni": 1},
    "avx512_core_bf16": {"avx2": 1, "avx512": 1, "vnni": 1, "bf16": 1},
    "avx512_core_fp16": {"avx2": 1, "avx512": 1, "vnni": 1, "bf16": 1, "fp16": 1},
    "avx512_core_amx": {"avx2": 1, "avx512": 1, "vnni": 1, "bf16": 1, "amx": 1},
}
_FLAGS = ("avx2", "avx512", "vnni", "bf16", "fp16", "amx")


def machine_features(environment: Mapping[str, Any]) -> dict[str, float]:
    """A machine in numbers; what is not known is left at 0.

    Args:
        environment: See `identity.environment`: "processor_class", "processor_family", "cores",
            "threads" and "devices" are read.
    """
    level = str(environment.get("processor_class", "")).rpartition(" ")[2]
    maker, _, family = str(environment.get("processor_family", "")).partition(" ")
    devices = environment.get("devices") or ["cpu"]
    return {
        **{flag: float(_LEVELS.get(level, {}).get(flag, 0)) for flag in _FLAGS},
        "amd": float(maker == "AuthenticAMD"),
        "intel": float(maker == "GenuineIntel"),
        # Of one maker, generations: 25 and 26 are AMD's Zen 3 and 4, and 5.
        "family": float(family) if family.isdigit() else 0.0,
        "cores": _log(environment.get("cores")),
        "threads": _log(environment.get("threads")),
        "gpu": float(any(str(device) != "cpu" for device in devices)),
    }


def _log(number: Any) -> float:
    return math.log2(number) if isinstance(number, int | float) and number > 0 else 0.0
