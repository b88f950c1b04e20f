"""`dynamo-backends cache`: what autotune has decided, and compiled code on disk."""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dynamo_backends.cli.bench import path
from dynamo_backends.cli.listing import Row, print_rows
from dynamo_backends.interface.errors import DecisionError

if TYPE_CHECKING:
    from dynamo_backends.autotune.decisions import Decision, DecisionStore

SUMMARY = "list, show, delete or copy autotune's decisions"

EXAMPLES = """\
A decision is valid for one graph, its input shapes, one kind of machine and one set of package
versions. If any of these differs, the graph is tuned again.

examples:
  dynamo-backends cache ls
  dynamo-backends cache show 3f2a
  dynamo-backends cache show 3f2a --html decision.html
  dynamo-backends cache export decisions.json
  dynamo-backends cache import decisions.json
  dynamo-backends cache clear
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("ls", help="list all decisions, one per line")
    listing.add_argument("--json", action="store_true", help="print JSON instead of a table")
    listing.add_argument(
        "--html", type=path, metavar="FILE.html", help="also write the list to an HTML page"
    )
    show = actions.add_parser("show", help="show the candidates of one decision")
    show.add_argument(
        "key", metavar="KEY", help="first characters of the decision's key, as shown by ls"
    )
    show.add_argument("--json", action="store_true", help="print JSON instead of a table")
    show.add_argument(
        "--html",
        type=path,
        metavar="FILE.html",
        help=("also write an HTML page with timing rounds and errors"),
    )
    clear = actions.add_parser(
        "clear",
        help=(
            "delete autotune's decisions, TVM's tuned schedules and measured times of blocks; they "
            "are measured again when needed"
        ),
    )
    clear.add_argument(
        "--executables",
        action="store_true",
        help="also delete compiled executables and traced graphs",
    )
    export = actions.add_parser("export", help="write all decisions to one file")
    export.add_argument(
        "file", type=path, metavar="FILE", help="JSON file to write; - for standard output"
    )
    importing = actions.add_parser(
        "import", help="import decisions that were exported on another machine"
    )
    importing.add_argument(
        "file", type=path, metavar="FILE", help="JSON file to read; - for standard input"
    )


def run(args: argparse.Namespace) -> int:
    """Carries an action out; returns the exit status.

    Raises:
        DecisionError: There is no such decision, or a file holds none.
    """
    from dynamo_backends.autotune.decisions import DecisionStore

    return _ACTIONS[args.action](args, DecisionStore())


def _ls(args: argparse.Namespace, decisions: "DecisionStore") -> int:
    found = decisions.all()
    _write_page(args, found)
    if args.json:
        print(json.dumps([d.to_dict() for d in found], indent=2))
        return 0
    console = Console()
    console.print(f"{len(found)} decisions in {decisions.folder}", highlight=False, soft_wrap=True)
    header = ("key", "decided", "graph", "calls", "chosen", "× eager")
    print_rows(console, header, list(map(_row, found)))
    return 0


def _row(decision: "Decision") -> Row:
    when = time.strftime("%Y-%m-%d", time.localtime(decision.created))
    texts = decision.key[:12], when, decision.graph, str(decision.ops), decision.winner
    inputs = ", ".join(decision.inputs[:2]) + (", ..." if len(decision.inputs) > 2 else "")
    return Row([(text, "") for text in (*texts, _gain(decision))], inputs, below=True)


def _gain(decision: "Decision") -> str:
    for row in decision.candidates:
        if row.name == decision.winner and row.speedup is not None:
            return f"{row.speedup[0]:.2f}"
    return "-"


def _show(args: argparse.Namespace, decisions: "DecisionStore") -> int:
    from dynamo_backends.capture.rendering import format_tuning_seconds, make_candidates_table

    decision = _find(args.key, decisions)
    _write_page(args, [decision])
    if args.json:
        print(json.dumps(decision.to_dict(), indent=2))
        return 0
    console = Console()
    console.print(f"[bold]{decision.key}[/]")
    console.print(f"{decision.graph} graph with {decision.ops} calls")
    console.print(f"inputs: {', '.join(decision.inputs) or 'none'}", markup=False)
    console.print(f"objective: {decision.objective}, precision: {decision.precision}")
    for name, value in decision.environment.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        console.print(f"{name}: {text}", markup=False)
    console.print(format_tuning_seconds(decision.candidates, decision.seconds), markup=False)
    console.print(make_candidates_table(decision.candidates, decision.winner))
    return 0


def _write_page(args: argparse.Namespace, found: "list[Decision]") -> None:
    if args.html:
        from dynamo_backends.bench.decisions_page import decisions_page

        page = decisions_page(found, shlex.join(["dynamo-backends", *args.given]))
        args.html.write_text(page, encoding="utf-8")


def _find(key: str, decisions: "DecisionStore") -> "Decision":
    found = [d for d in decisions.all() if d.key.startswith(key)]
    if len(found) == 1:
        return found[0]
    problem = (
        (f"{len(found)} decisions have a key that begins")
        if found
        else "no decision has a key that begins"
    )
    raise DecisionError(
        f"{problem} with {key!r}. Run `dynamo-backends cache ls` to list the "
        f"{len(decisions.all())} keys in {decisions.folder}."
    )


def _clear(args: argparse.Namespace, decisions: "DecisionStore") -> int:
    from dynamo_backends.aot.traces import FOLDER as TRACES
    from dynamo_backends.runtime.compile_journal import FOLDER as JOURNAL
    from dynamo_backends.runtime.speed_check import FOLDER as PACES
    from dynamo_backends.tvm.records import FOLDER

    folder = decisions.folder.parent
    print(f"removed {decisions.clear()} decisions from {decisions.folder}")
    schedules = folder / FOLDER
    if removed := _remove(schedules.glob("*/*.bin")):
        print(f"removed {removed} tuned schedules from {schedules}")
    paces = folder / PACES
    if removed := _remove(paces.glob("*.bin")):
        print(f"removed {removed} measured times of blocks from {paces}")
    if args.executables:
        print(f"removed {_remove(folder.glob('*.bin'))} compiled graphs from {folder}")
        traces = folder / TRACES
        print(f"removed {_remove(traces.glob('*.bin'))} traced graphs from {traces}")
    journal = folder / JOURNAL
    if removed := _remove(journal.glob("*.bin")):
        print(f"removed {removed} records of compilations that crashed from {journal}")
    return 0


def _remove(files: Iterable[Path]) -> int:
    paths = list(files)
    for each in paths:
        each.unlink(missing_ok=True)
    return len(paths)


def _export(args: argparse.Namespace, decisions: "DecisionStore") -> int:
    from dynamo_backends.autotune.decisions import FORMAT

    found = decisions.all()
    text = json.dumps({"format": FORMAT, "decisions": [d.to_dict() for d in found]}, indent=1)
    if str(args.file) == "-":
        print(text)
    else:
        args.file.write_text(text + "\n", encoding="utf-8")
        print(f"wrote {len(found)} decisions to {args.file}")
    return 0


def _import(args: argparse.Namespace, decisions: "DecisionStore") -> int:
    found = _read(args.file)
    taken = decisions.merge_newer(found)
    kept = len(found) - taken
    print(
        f"imported {taken} decisions"
        + (f", skipped {kept} that are not newer than the existing ones" if kept else "")
    )
    return 0


def _read(name: Path) -> "list[Decision]":
    from dynamo_backends.autotune.decisions import Decision

    try:
        text = sys.stdin.read() if str(name) == "-" else name.read_text(encoding="utf-8")
        content: Any = json.loads(text)
        if not isinstance(content, dict) or not isinstance(content.get("decisions"), list):
            raise ValueError("it does not contain a list of decisions")
        return [Decision.from_dict(given) for given in content["decisions"]]
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DecisionError(
            f"{name} cannot be imported: {error}. Pass a file that `dynamo-backends cache export` "
            "has written."
        ) from error


_ACTIONS = {"ls": _ls, "show": _show, "clear": _clear, "export": _export, "import": _import}
