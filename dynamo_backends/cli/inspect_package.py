"""`dynamo-backends inspect`: what is in a package."""

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from dynamo_backends.cli.bench import path

SUMMARY = "show the contents of a package: model or step, backend, versions, parts"

EXAMPLES = """\
Reads only the manifest; nothing is loaded, compiled or run.

examples:
  dynamo-backends inspect model.dbp
  dynamo-backends inspect model.dbp --json
"""

_WIDTH = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "file", type=path, metavar="FILE", help="package written by dynamo_backends.save"
    )
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints what is in a package; returns the exit status.

    Raises:
        PackageError: The file is none.
    """
    from dynamo_backends.package.archive import Archive

    with Archive(args.file) as archive:
        if args.json:
            print(json.dumps(archive.manifest, indent=1))
            return 0
        for line in described(archive.manifest, archive.sizes):
            print(line)
    return 0


def described(manifest: Mapping[str, Any], sizes: Mapping[str, int]) -> Iterator[str]:
    """A manifest in lines of 80 columns.

    Args:
        manifest: See `package.archive`.
        sizes: Bytes of the parts.
    """
    from dynamo_backends.package.structure import decoded

    options = decoded(manifest["options"])
    machine, weights = manifest["machine"], manifest["weights"]
    yield from _entry(manifest.get("kind", "model"), manifest["name"])
    yield from _entry("called with", manifest["calls"])
    yield from _entry("backend", manifest["backend"])
    if options:
        yield from _entry("options", ", ".join(f"{k}={v!r}" for k, v in options.items()))
    yield from _entry("executables", _executables(manifest, sizes))
    for form in manifest.get("forms", ()):
        yield from _entry("", form)
    stored = sum(size for name, size in sizes.items() if name.startswith("weights"))
    yield from _entry("weights", f"{len(weights['names'])} tensors, {_bytes(stored)} in the file")
    if weights["checkpoint"] is not None:
        beside = weights["checkpoint"]
        count = len(beside["tensors"])
        yield from _entry("checkpoint", f"{beside['name']} contains {count} of them")
    yield from _entry("portable form", f"graph.json, {_bytes(sizes['graph.json'])}")
    versions = ", ".join(f"{k} {v}" for k, v in machine["packages"].items())
    yield from _entry("versions", versions)
    where = f"{machine['processor']}, {machine['platform']}, {machine['threads']} threads"
    yield from _entry("saved on", where)
    for note in manifest["notes"]:
        yield from _entry("note", note)
    yield from _entry("all", f"{len(sizes)} parts, {_bytes(sum(sizes.values()))}")


def _executables(manifest: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    found = manifest["executables"]
    if not found:
        return "none"
    total = sum(sizes[part] for entry in found for part in entry["parts"].values())
    return f"{len(found)}, {_bytes(total)}"


def _entry(name: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"{name:<15}",
        subsequent_indent=" " * 15,
        break_on_hyphens=False,
    )


def _bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
