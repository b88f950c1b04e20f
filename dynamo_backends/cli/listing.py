"""`dynamo-backends list`: every backend and whether it is usable here."""

import argparse
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

_INDENT = "    "


@dataclass(frozen=True)
class Row:
    """One thing of a list.

    Attributes:
        cells: The columns: text, and its style.
        about: A last column, or what `below` says.
        below: Whether what does not fit is shown below the line; else the column is left out where
            that of one row does not fit.
        problem: Sentences below the line, wrapped between words.
        command: What fixes it. Each command has a line of its own, never broken, to be copied.
    """

    cells: Sequence[tuple[str, str]]
    about: str = ""
    below: bool = False
    problem: str = ""
    command: str = ""


def print_rows(console: Console, header: Sequence[str], rows: Sequence[Row]) -> None:
    """Prints rows under a header."""
    lines = [[(name, "bold") for name in header], *(row.cells for row in rows)]
    widths = [max(len(cells[i][0]) for cells in lines) for i in range(len(header))]
    left = console.width - sum(width + 2 for width in widths)
    has_room = all(len(row.about) <= left for row in rows)
    _print_line(console, _line(lines[0], widths))
    for row in rows:
        line = _line(row.cells, widths)
        if has_room or (row.below and len(row.about) <= left):
            line.append(row.about)
        _print_line(console, line)
        if row.below and len(row.about) > left:
            print_words(console, row.about)
        print_words(console, row.problem)
        for command in filter(None, row.command.split("; ")):
            print_command(console, command)


def print_command(console: Console, command: str) -> None:
    """Prints a command in a line of its own, never broken."""
    console.print(Text(f"{_INDENT}{command}", style="cyan"), soft_wrap=True)


def _line(cells: Sequence[tuple[str, str]], widths: Sequence[int]) -> Text:
    line = Text()
    for (text, style), width in zip(cells, widths, strict=True):
        line.append(text, style=style).append(" " * (width - len(text) + 2))
    return line


def _print_line(console: Console, line: Text) -> None:
    line.rstrip()
    line.truncate(console.width, overflow="ellipsis")
    console.print(line, soft_wrap=True)


def print_words(console: Console, text: str, indent: int = 1) -> None:
    """Prints sentences, wrapped between words.

    Args:
        console: Where.
        text: They.
        indent: Steps by which the lines are indented.
    """
    width = max(console.width - 1, 20)
    for line in textwrap.wrap(
        text,
        width,
        initial_indent=_INDENT * indent,
        subsequent_indent=_INDENT * indent,
        break_long_words=False,
        break_on_hyphens=False,
    ):
        console.print(Text(line), soft_wrap=True)


SUMMARY = "list backends: usable here, training, dynamic shapes, devices"


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
