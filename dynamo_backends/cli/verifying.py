"""`dynamo-backends verify`: whether a package is whole and computes what its graph says."""

import argparse

from dynamo_backends.cli.bench import path

SUMMARY = "check a package: checksums, and results compared with its portable graph"

EXAMPLES = """\
Loads the model, calls it with the saved example arguments, and compares the results with those of
the portable graph in eager, and with a float64 reference where they are not close. A training step
is only loaded and not called, because a package contains no batch.

examples:
  dynamo-backends verify model.dbp
  dynamo-backends verify model.dbp --strict --checkpoint model.safetensors
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "file", type=path, metavar="FILE", help="package written by dynamo_backends.save"
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help=("fail if the package would be compiled again or run in eager"),
    )
    parser.add_argument(
        "--checkpoint", type=path, metavar="FILE", help="checkpoint file that contains its weights"
    )


def run(args: argparse.Namespace) -> int:
    """Verifies a package; returns the exit status, 1 if results differ.

    Raises:
        PackageError: The file is damaged, or cannot be loaded.
    """
    import warnings

    from dynamo_backends.package.verifying import check_parts, compare_package, is_step

    print(f"the checksums of {check_parts(args.file)} parts are correct")
    if is_step(args.file):
        return _load_step(args)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        outcome = compare_package(args.file, strict=args.strict, checkpoint=args.checkpoint)
    for each in told:
        print(f"warning: {each.message}")
    counts = f"{outcome.executables} from the file, {outcome.compiled} compiled here"
    print(f"ran on {outcome.backend}, executables: {counts}")
    if outcome.difference is not None:
        print(f"results differ from those of the portable graph: {outcome.difference}")
        return 1
    print("results are as accurate as those of the portable graph")
    return 0


def _load_step(args: argparse.Namespace) -> int:
    import dynamo_backends

    step = dynamo_backends.load_step(args.file, strict=args.strict)
    count = sum(report.cache_hits for report in step.reports)
    executables = "1 executable" if count == 1 else f"{count} executables"
    print(f"the training step can run on {step.backend}, with {executables} from the file")
    return 0
