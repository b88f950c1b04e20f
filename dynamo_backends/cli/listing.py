"""`dynamo-backends list`: every backend and whether it is usable here."""

import argparse
import json

from rich.console import Console
from rich.table import Table

SUMMARY = "every backend: usable here? training? dynamic shapes? devices?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Prints the list; returns the exit status."""
    return show(args.json)


def show(as_json: bool) -> int:
    """Prints the list as a table or as JSON; returns the exit status."""
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
    table = Table(title="Backends of this package", show_lines=True)
    longest = max((len(str(row["name"])) for row in rows), default=0)
    table.add_column("backend", min_width=longest, no_wrap=True)  # names are to be copied
    for column in ("usable", "training", "dynamic shapes", "devices", "what it is"):
        table.add_column(column, overflow="fold")
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
