"""Runs the command line: `python -m dynamo_backends.cli`."""

import sys

from dynamo_backends.cli.main import main

sys.exit(main())
