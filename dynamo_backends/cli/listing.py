"""`dynamo-backends list`: every backend and whether it is usable here."""

import argparse
import json
from typing import Any

from rich.console import Console

from dynamo_backends.cli.rows import Row, print_rows

SUMMARY = "every backend: usable here? training? dynamic shapes? devices?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Prints the list; returns the exit status."""
    return show(args.json)


def show(as_json: bool) -> int:
    """Prints the list as a table or as JSON; returns the exit status."""
    from dynamo_backends.interface.registry import get_backend, list_backends, third_party_backends

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
    console = Console()
    header = ("backend", "usable", "training", "devices", "shapes")
    print_rows(console, header, [_row(row) for row in rows])
    if others:
        console.print(f"Backends of other packages: {', '.join(others)}")
    return 0


def _row(row: dict[str, Any]) -> Row:
    cells = (
        (row["name"], ""),
        _yes(row["usable"]),
        _yes(row["training"]),
        (", ".join(row["devices"]), ""),
        (str(row["dynamic_shapes"]), ""),
    )
    if row["usable"]:
        return Row(cells, row["summary"])
    return Row(cells, row["summary"], problem=row["detail"], command=row["remedy"])


def _yes(value: object) -> tuple[str, str]:
    return ("yes", "green") if value else ("no", "red")
