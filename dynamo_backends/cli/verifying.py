"""`dynamo-backends verify`: whether a package is whole and computes what its graph says."""

import argparse

from dynamo_backends.cli.bench import path

SUMMARY = "check a package: checksums, and results against its portable form"

EXAMPLES = """\
The model is loaded as on any machine, called with the arguments it was saved with, and compared
with the graph run call by call, against float64 where they are not close. A training step is
loaded, and not taken: a file has no batch.

examples:
  dynamo-backends verify model.dbp
  dynamo-backends verify model.dbp --strict --checkpoint model.safetensors
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "file", type=path, metavar="FILE", help="file written by dynamo_backends.save"
    )
    parser.add_argument(
        "--strict", action="store_true", help="fail if it would be compiled or run in eager"
    )
    parser.add_argument(
        "--checkpoint", type=path, metavar="FILE", help="the checkpoint with its weights"
    )


def run(args: argparse.Namespace) -> int:
    """Verifies a package; returns the exit status, 1 if results differ.

    Raises:
        PackageError: The file is damaged, or cannot be loaded.
    """
    import warnings

    from dynamo_backends.package.verifying import check_parts, compare_package, is_step

    print(f"{check_parts(args.file)} parts have their checksums")
    if is_step(args.file):
        return _load_step(args)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        outcome = compare_package(args.file, strict=args.strict, checkpoint=args.checkpoint)
    for each in told:
        print(f"warning: {each.message}")
    counts = f"{outcome.executables} from the file, {outcome.compiled} compiled here"
    print(f"run on {outcome.backend}, executables: {counts}")
    if outcome.difference is not None:
        print(f"it differs from its portable form: {outcome.difference}")
        return 1
    print("results are as accurate as those of its portable form")
    return 0


def _load_step(args: argparse.Namespace) -> int:
    import dynamo_backends

    step = dynamo_backends.load_step(args.file, strict=args.strict)
    count = sum(report.cache_hits for report in step.reports)
    executables = "1 executable" if count == 1 else f"{count} executables"
    print(f"the training step can be used on {step.backend}, {executables} from the file")
    return 0
