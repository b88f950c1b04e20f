"""The command line: `dynamo-backends list`, `doctor` and `explain`."""

from dynamo_backends.cli.doctor import Check, diagnose
from dynamo_backends.cli.main import main

__all__ = ["Check", "diagnose", "main"]
