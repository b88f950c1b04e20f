"""`dynamo-backends conformance BACKEND`: whether a backend does what torch promises."""

import argparse
import json
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_backends.cli.bench import (
    absolute,
    natural,
    output_console,
    path,
    positive,
    positive_number,
)
from dynamo_backends.interface.errors import OptionError

if TYPE_CHECKING:
    from dynamo_backends.conformance.catalogue import Settings

SUMMARY = "check a backend: operators, semantics, changed weights, changing sizes, models"

EXAMPLES = """\
BACKEND is a backend name of torch.compile, MODULE:FUNCTION or FILE.py:FUNCTION.

groups:
  operators, gradients   operators of PyTorch's OpInfo database, with its sample inputs
  semantics              mutation, aliases, strides, dtypes, random numbers, autocast, training
  weights                weights that are edited, replaced, loaded or moved after compilation; views
  traffic                input sizes that change from call to call
  models                 small models of the suites, in inference and training
  rewrites               random graphs of operators that compilers rewrite, with extreme values

--rewrites N --seed S runs N random graphs with the seeds S, S + 1, ...; --rewrites 1 repeats one of
them. Each graph is called with random numbers, and then with infinities, NaN, large and tiny
numbers. For a wrong result, the smallest program that reproduces it is printed. Results are saved
only with --output.

Checks run in separate processes with a time limit, so that crashes and hangs are reported, too.
OUTPUT/BACKEND.md is the report, and OUTPUT/BACKEND.json has the same results as JSON. The exit
status is 1 if a check failed.

examples:
  dynamo-backends conformance inductor
  dynamo-backends conformance openvino --groups semantics weights --output reports
  dynamo-backends conformance mine.plugin:mine --groups operators --only "nn.functional.*" --full
  dynamo-backends conformance onnxrt --rewrites 1000 --seed 0
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add = parser.add_argument
    add("backend", metavar="BACKEND", help="backend to check, see below")
    add("--groups", nargs="+", metavar="GROUP", help="groups to run (default: all)")
    add(
        "--only",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help='patterns of check names, such as "add*"',
    )
    add(
        "--samples",
        type=positive,
        metavar="N",
        help="maximum number of samples per operator (default: 1)",
    )
    add("--dtype", nargs="+", metavar="NAME", help="dtypes of operator inputs (default: float32)")
    add(
        "--share",
        type=positive,
        default=1,
        metavar="N",
        help="check only every N-th operator (default: all)",
    )
    add("--full", action="store_true", help="check all samples, all dtypes and large models")
    add("--time-limit", type=positive_number, default=180.0, metavar="S",
        help="time limit for each check in seconds (default: 180)")  # fmt: skip
    add(
        "--threads",
        type=positive,
        default=1,
        metavar="N",
        help="number of torch threads (default: 1)",
    )
    add(
        "--processes",
        type=positive,
        default=1,
        metavar="N",
        help="number of parallel processes (default: 1)",
    )
    add(
        "--output",
        type=path,
        metavar="DIR",
        help="directory for results (default: conformance; with --rewrites nothing is saved)",
    )
    add("--rewrites", type=positive, metavar="N", help="number of random graphs; "
                                                       "without --groups, only these "
                                                       "are checked (default: 100)")  # fmt: skip
    add(
        "--seed",
        type=natural,
        default=0,
        metavar="S",
        help="seed of the first random graph (default: 0)",
    )
    add(
        "--json",
        action="store_true",
        help="print results as JSON to stdout, and everything else to stderr",
    )
    add("--resume", action="store_true", help="continue the run in OUTPUT")


def run(args: argparse.Namespace) -> int:
    """Checks a backend and writes its page; returns the exit status."""
    if args.rewrites and not args.output:
        with tempfile.TemporaryDirectory() as folder:
            return _run(args, Path(folder), saves=False)
    return _run(args, Path(args.output or "conformance"), saves=True)


def _run(args: argparse.Namespace, folder: Path, saves: bool) -> int:
    from dynamo_backends.bench.backends import require_backend
    from dynamo_backends.conformance import catalogue, pages, runs
    from dynamo_backends.conformance.journal import Journal
    from dynamo_backends.runtime.cache import write_file_atomically

    console = output_console(stderr=args.json)
    require_backend(absolute(args.backend))
    settings = _settings(args)
    files = runs.Files.of(settings.backend, folder)
    if files.journal.exists() and not args.resume:
        raise OptionError(
            f"{files.journal} exists. Pass --resume to continue this run, or --output to write to "
            "another directory."
        )
    asked = catalogue.checks(settings)
    context = runs.context(settings)
    journal = Journal(files.journal, args.resume, context=context)
    interrupted = False
    try:
        runs.run_all(asked, settings, journal, console, args.processes, files.log)
    except KeyboardInterrupt:
        interrupted = True
    found = runs.result(asked, journal, context, _commands(args, files.json))
    outcomes = [journal.outcomes[c] for c in asked if c in journal.outcomes]
    share = pages.native_share(settings.backend, outcomes)
    for line in (pages.headline(outcomes), *filter(None, [share])):
        console.print(line, highlight=False)
    if args.json:
        print(json.dumps(found, indent=1))
    if saves:
        write_file_atomically(files.json, (json.dumps(found, indent=1) + "\n").encode())
        files.page.write_text(pages.page(found), encoding="utf-8")
        console.print(f"saved {files.page} and {files.json}", highlight=False, soft_wrap=True)
    else:
        console.print(pages.summary(outcomes), highlight=False, markup=False)
    if interrupted:
        goes_on = "; run the same command with --resume to continue" if saves else ""
        console.print(f"Interrupted after {len(outcomes)} of {len(asked)} checks{goes_on}.",
                      highlight=False)  # fmt: skip
        return 130
    return int(any(outcome.failed for outcome in outcomes))


def _commands(args: argparse.Namespace, earlier: Path) -> list[str]:
    """Returns what was typed, after that of the runs that are gone on with."""
    typed = shlex.join(["dynamo-backends", *(a for a in args.given if a != "--resume")])
    before: list[str] = []
    if args.resume and earlier.exists():
        before = json.loads(earlier.read_text(encoding="utf-8"))["commands"]
    return list(dict.fromkeys([*before, typed]))


def _settings(args: argparse.Namespace) -> "Settings":
    from dynamo_backends.conformance.catalogue import Settings
    from dynamo_backends.conformance.outcomes import DTYPES, GROUPS

    dtypes = args.dtype or (DTYPES if args.full else ("float32",))
    for given, known, word in ((args.groups or (), GROUPS, "group"), (dtypes, DTYPES, "dtype")):
        for name in set(given) - set(known):
            raise OptionError(f"there is no {word} {name!r}; there are: {', '.join(known)}.")
    groups = args.groups or (("rewrites",) if args.rewrites else GROUPS)
    return Settings(
        backend=absolute(args.backend),
        groups=tuple(g for g in GROUPS if g in groups),
        samples=args.samples or (None if args.full else 1),
        dtypes=tuple(dtypes),
        share=args.share,
        only=tuple(args.only),
        every_model=args.full,
        limit_s=args.time_limit,
        threads=args.threads,
        rewrites=args.rewrites or Settings.rewrites,
        seed=args.seed,
    )
