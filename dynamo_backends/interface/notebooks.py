"""Renders reports and autotune decisions as HTML tables for notebooks."""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

_CELL = "text-align:left;vertical-align:top;padding:0 1em 0 0"
_MOST_LINES = 8


def table_html(title: str, rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Returns an HTML table with a title; cell texts are escaped.

    Args:
        title: Above it.
        rows: The texts of its cells, which may have several lines.
        header: The names of its columns; none by default.
    """
    lines = [_row("th", header)] if header else []
    lines += [_row("td", row) for row in rows]
    return f"<p><b>{html.escape(title)}</b></p><table>{''.join(lines)}</table>"


def fields_html(title: str, values: Mapping[str, Any]) -> str:
    """Returns an HTML table of the non-empty values by name.

    Args:
        title: Above it.
        values: By name.
    """
    return table_html(title, ((name, _text(value)) for name, value in values.items() if value))


def candidates_html(rows: Sequence[Any]) -> str:
    """Returns an HTML table of autotune candidates; empty if there are none."""
    if not rows:
        return ""
    header = ("candidate", "compile s", "ms", "× eager", "why not")
    cells = (
        (
            row.name,
            "-" if row.compile_s is None else f"{row.compile_s:.1f}",
            "-" if row.seconds is None else f"{row.seconds * 1e3:.3g}",
            "-" if row.speedup is None else f"{row.speedup[0]:.2f}",
            row.reason or "chosen",
        )
        for row in rows
    )
    return table_html("Candidates", cells, header)


def _row(tag: str, cells: Sequence[str]) -> str:
    style = f'style="{_CELL}"'
    shown = (html.escape(cell).replace("\n", "<br>") for cell in cells)
    return "<tr>" + "".join(f"<{tag} {style}>{cell}</{tag}>" for cell in shown) + "</tr>"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
        return ", ".join(f"{name}: {_text(each)}" for name, each in value.items() if each)
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_text(each)}" for name, each in value.items())
    if not isinstance(value, list | tuple):
        return str(value)
    left = len(value) - _MOST_LINES
    more = [f"and {left} more"] if left > 0 else []
    return "\n".join([*map(_text, value[:_MOST_LINES]), *more])
