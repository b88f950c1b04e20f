"""What measurements depend on."""

import os
import platform
from typing import Any

import torch

from dynamo_backends.interface.packages import versions
from dynamo_backends.interface.registry import list_backends, package_versions
from dynamo_backends.runtime.processor import processor_name

_PACKAGES = ("torch", "numpy", "torchvision", "transformers", "timm")
"""Besides those of the backends."""


def environment() -> dict[str, Any]:
    """Returns what a measurement depends on: versions, processor, threads, devices."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor_name(),
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": versions(_PACKAGES) | package_versions(list_backends()),
    }


def threads_in_words(count: int | None) -> str:
    """Such as "1 torch thread"."""
    return f"{count} torch thread" + "s" * (count != 1)


def environment_line() -> str:
    """`environment` in one line, for the head of a table."""
    facts = environment()
    device = facts["cuda"] or facts["processor"]
    torch_and_jax = (f"{n} {v}" for n, v in facts["versions"].items() if n in ("torch", "jax"))
    return (
        f"{device}, {threads_in_words(facts['torch_threads'])}; Python {facts['python']},"
        f" {', '.join(torch_and_jax)}"
    )
