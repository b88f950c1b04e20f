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
BACKEND is a name that torch.compile takes, MODULE:FUNCTION or FILE.py:FUNCTION.

groups:
  operators, gradients   PyTorch's own database of operators, with its sample inputs
  semantics              mutation, aliases, strides, dtypes, random numbers, autocast, training
  weights                edited, replaced, loaded or moved after compilation; read through views
  traffic                sizes that change from call to call
  models                 small models of the suites, in inference and training
  rewrites               random graphs of operators that compilers rewrite, on extreme values

--rewrites N --seed S runs N random graphs, those of the seeds S, S + 1, ...; --rewrites 1 repeats
one. Each is called with random numbers, then with infinities, NaN, large and tiny numbers. What is
wrong is printed as the smallest program that shows it. Nothing is saved without --output.

Checks run in processes of their own with a time limit: what crashes or hangs is a line of the page.
OUTPUT/BACKEND.md is the page, OUTPUT/BACKEND.json the same for programs. The exit status is 1 if a
check failed.

examples:
  dynamo-backends conformance inductor
  dynamo-backends conformance openvino --groups semantics weights --output reports
  dynamo-backends conformance mine.plugin:mine --groups operators --only "nn.functional.*" --full
  dynamo-backends conformance onnxrt --rewrites 1000 --seed 0
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add = parser.add_argument
    add("backend", metavar="BACKEND", help="see below")
    add("--groups", nargs="+", metavar="GROUP", help="default: all")
    add("--only", nargs="+", default=[], metavar="PATTERN", help='names of checks, such as "add*"')
    add("--samples", type=positive, metavar="N", help="samples per operator, at most (default: 1)")
    add("--dtype", nargs="+", metavar="NAME", help="dtypes of operators (default: float32)")
    add("--share", type=positive, default=1, metavar="N", help="one in N operators (default: all)")
    add("--full", action="store_true", help="all samples, all dtypes, large models")
    add("--time-limit", type=positive_number, default=180.0, metavar="S",
        help="seconds that a check may take (default: 180)")  # fmt: skip
    add("--threads", type=positive, default=1, metavar="N", help="torch's threads (default: 1)")
    add(
        "--processes",
        type=positive,
        default=1,
        metavar="N",
        help="processes in parallel (default: 1)",
    )
    add("--output", type=path, metavar="DIR", help="default: conformance; none with --rewrites")
    add("--rewrites", type=positive, metavar="N", help="this many random graphs, and nothing else "
        "unless --groups names it (default: 100)")  # fmt: skip
    add("--seed", type=natural, default=0, metavar="S", help="seed of the first graph (default: 0)")
    add("--json", action="store_true", help="print results as JSON, everything else to stderr")
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
    from dynamo_backends.runtime.cache import write_whole

    console = output_console(stderr=args.json)
    require_backend(absolute(args.backend))
    settings = _settings(args)
    files = runs.Files.of(settings.backend, folder)
    if files.journal.exists() and not args.resume:
        raise OptionError(
            f"{files.journal} exists: --resume goes on with it, --output names another folder."
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
        write_whole(files.json, (json.dumps(found, indent=1) + "\n").encode())
        files.page.write_text(pages.page(found), encoding="utf-8")
        console.print(f"saved {files.page} and {files.json}", highlight=False, soft_wrap=True)
    else:
        console.print(pages.summary(outcomes), highlight=False, markup=False)
    if interrupted:
        goes_on = "; the same command with --resume goes on" if saves else ""
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
