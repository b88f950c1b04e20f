"""Calls a function for `harness.call_apart`: `python -m harness MODULE FUNCTION ARGUMENTS`."""

import importlib
import json
import sys

from harness.processes import hand_back

if __name__ == "__main__":
    module, name, arguments = sys.argv[1:]
    function = getattr(importlib.import_module(module), name)
    hand_back(result=function(*json.loads(arguments)))
