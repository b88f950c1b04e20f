"""The command line: `dynamo-backends list` and `dynamo-backends doctor`."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Check:
    """One line of `doctor`.

    Attributes:
        name: What was looked at.
        status: "ok", "missing" (optional, and not there) or "broken" (there, and does not work).
        detail: Version, or what is wrong.
        remedy: What mends it, a command where there is one.
    """

    name: str
    status: Literal["ok", "missing", "broken"]
    detail: str
    remedy: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name; by default those of the process.

    Returns:
        The exit status: 0, or 1 if `doctor` found something broken.
    """
    parser = argparse.ArgumentParser(
        prog="dynamo-backends",
        description="Backends for torch.compile: what there is, and what works on this machine.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("list", "every backend: usable here? training? dynamic shapes? devices?"),
        ("doctor", "versions, devices, what is missing and the command that mends it"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    return _list(args.json) if args.command == "list" else _doctor(args.json)


def _list(as_json: bool) -> int:
    from dynamo_backends.registry import get_backend, list_backends, third_party_backends

    rows = []
    for name in list_backends():
        backend = get_backend(name)
        found = backend.availability()
        rows.append(
            {
                "name": name,
                "usable": found.usable,
                "training": backend.trains,
                "dynamic_shapes": backend.dynamic_shapes,
                "devices": list(found.devices),
                "summary": backend.summary,
                "detail": found.reason,
                "remedy": found.remedy,
            }
        )
    others = third_party_backends()
    if as_json:
        print(json.dumps({"backends": rows, "third_party": others}, indent=2))
        return 0
    table = Table(title="Backends of this package")
    for column in ("backend", "usable", "training", "dynamic shapes", "devices", "what it is"):
        table.add_column(column)
    for row in rows:
        about = str(row["summary"])
        if not row["usable"]:
            about += f"\n[red]{row['detail']}[/red]; {row['remedy']}"
        table.add_row(
            str(row["name"]),
            _yes(row["usable"]),
            _yes(row["training"]),
            str(row["dynamic_shapes"]),
            ", ".join(row["devices"]),  # type: ignore[arg-type]
            about,
        )
    console = Console()
    console.print(table)
    if others:
        console.print(f"Backends of other packages: {', '.join(others)}")
    return 0


def _yes(value: object) -> str:
    return "[green]yes[/green]" if value else "[red]no[/red]"


def _doctor(as_json: bool) -> int:
    checks = diagnose()
    if as_json:
        print(json.dumps([asdict(c) for c in checks], indent=2))
    else:
        table = Table(title="dynamo-backends doctor")
        for column in ("what", "status", "found", "to mend it"):
            table.add_column(column, overflow="fold")
        colors = {"ok": "green", "missing": "yellow", "broken": "red"}
        for check in checks:
            color = colors[check.status]
            status = f"[{color}]{check.status}[/{color}]"
            table.add_row(check.name, status, check.detail, check.remedy)
        Console().print(table)
    return int(any(c.status == "broken" for c in checks))


def diagnose() -> list[Check]:
    """Looks at everything that this package needs or can use, in a fixed order."""
    checks = [_python(), _torch(), _autoload()]
    checks += [
        _package(name, extra)
        for name, extra in (("jax", "xla"), ("jaxlib", "xla"), ("transformers", "bench"))
    ]
    checks += [_devices(), _cache()]
    checks += _backends()
    return checks


def _python() -> Check:
    return Check("Python", "ok", platform.python_version())


def _torch() -> Check:
    try:
        import torch
    except Exception as error:
        return Check("torch", "broken", f"{type(error).__name__}: {error}", "pip install torch")
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < (2, 11):
        return Check("torch", "broken", torch.__version__, "pip install --upgrade 'torch>=2.11'")
    return Check("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")


def _autoload() -> Check:
    name = "openxla without an import"
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        detail = "TORCH_DEVICE_BACKEND_AUTOLOAD is 0: import dynamo_backends before compiling"
        return Check(name, "missing", detail, "unset TORCH_DEVICE_BACKEND_AUTOLOAD")
    points = importlib.metadata.entry_points(group="torch.backends")
    if "dynamo_backends" not in points.names:
        detail = "the entry point is not installed: import dynamo_backends before compiling"
        return Check(name, "missing", detail, "pip install dynamo-backends")
    return Check(name, "ok", "through the entry point group torch.backends")


def _package(name: str, extra: str) -> Check:
    remedy = f"pip install 'dynamo-backends[{extra}]'"
    if importlib.util.find_spec(name) is None:
        return Check(name, "missing", "not installed", remedy)
    try:
        importlib.import_module(name)
        return Check(name, "ok", importlib.metadata.version(name))
    except Exception as error:
        return Check(name, "broken", f"{type(error).__name__}: {error}", remedy)


def _devices() -> Check:
    try:
        import torch
    except Exception:
        return Check("devices", "broken", "torch does not import", "pip install torch")
    names = [platform.processor() or platform.machine()]
    if torch.cuda.is_available():
        names += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Check("devices", "ok", "; ".join(names))


def _cache() -> Check:
    from dynamo_backends.graph.cache import DiskCache, cache_folder

    folder = cache_folder()
    parent = next(p for p in (folder, *folder.parents) if p.exists())
    if not os.access(parent, os.W_OK):
        return Check(
            "cache", "missing", f"{folder} cannot be written", "set DYNAMO_BACKENDS_CACHE=FOLDER"
        )
    return Check("cache", "ok", f"{folder}, {DiskCache(folder).size() / 1e6:.1f} MB")


def _backends() -> list[Check]:
    from dynamo_backends.registry import get_backend, list_backends

    checks = []
    for name in list_backends():
        try:
            found = get_backend(name).availability()
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
            checks.append(Check(f"backend {name}", "broken", detail, "please report this"))
            continue
        status: Literal["ok", "missing"] = "ok" if found.usable else "missing"
        where = f" on {', '.join(found.devices)}" if found.devices else ""
        checks.append(Check(f"backend {name}", status, f"{found.reason}{where}", found.remedy))
    return checks


if __name__ == "__main__":
    sys.exit(main())
