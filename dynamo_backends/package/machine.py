"""Describes what executables depend on (versions, processor, settings), and compares it."""

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dynamo_backends.interface import protocols
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.mesh import format_bytes
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.packages import installed_versions
from dynamo_backends.runtime import cpu_info
from dynamo_backends.runtime.cache import source_digest


def package_summary(backend: str, tensors: Sequence[torch.Tensor], saved: Mapping[str, Any]) -> str:
    """Formats backend, weights and versions of a package for `repr`.

    Args:
        backend: Name of the backend that runs it.
        tensors: Its weights, or the state of a step.
        saved: What `described` gave when it was saved; empty: it was not loaded from a file.
    """
    size = format_bytes(sum(tensor.nbytes for tensor in tensors))
    versions = ", ".join(f"{k} {v}" for k, v in saved.get("packages", {}).items())
    saved_with = f", saved with {versions}" if versions else ""
    return f"backend={backend!r}, {len(tensors)} tensors of {size}{saved_with}"


def described(backend: Backend | None, options: Options | None) -> dict[str, Any]:
    """Returns this machine, as far as executables of a backend depend on it.

    Args:
        backend: None: torch alone.
        options: Options of the backend.
    """
    key = protocols.cache_key(backend, options)
    own = installed_versions(("dynamo-backends",)).get("dynamo-backends", "")
    return {
        "packages": {"torch": torch.__version__, **(backend.versions() if backend else {})},
        "dynamo_backends": f"{own} {source_digest()}".strip(),
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": cpu_info.cpu_name(),
        "instruction_sets": list(cpu_info.cpu_flags()),
        "threads": torch.get_num_threads(),
        "key": f"{key} {cpu_info.cpu_cache_key()}",
    }


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Returns how this machine differs from that where executables were saved; empty: it fits.

    The number of threads is named where the executables' key differs with it.
    """
    found = [
        f"{name} was {saved['packages'].get(name, 'absent')} when saved and here "
        f"{here['packages'].get(name, 'absent')}"
        for name in sorted(saved["packages"].keys() | here["packages"].keys())
        if saved["packages"].get(name) != here["packages"].get(name)
    ]
    names = {"dynamo_backends": "dynamo_backends", "platform": "the platform"}
    found += [f"{text} {saved[key]} and here {here[key]}" for key, text in names.items()
              if saved[key] != here[key]]  # fmt: skip
    there, ours = set(saved["instruction_sets"]), set(here["instruction_sets"])
    if there != ours:
        lacks, more = sorted(there - ours), sorted(ours - there)
        words = [f"lacks {_some(lacks)}" if lacks else "", f"has {_some(more)}" if more else ""]
        found.append(f"this processor {' and '.join(filter(None, words))}")
    if saved["key"] != here["key"] and not found:
        if saved["threads"] != here["threads"]:
            found.append(
                f"torch had {saved['threads']} threads when the package was saved and has "
                f"{here['threads']} here (call torch.set_num_threads({saved['threads']}))"
            )  # fmt: skip
        else:
            found.append("settings that affect compilation differ, such as the matmul precision")
    return found


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
