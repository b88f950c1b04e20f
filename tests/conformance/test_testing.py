"""`BackendConformance` in a test file of an author of backends, and pytest's options for it."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from dynamo_backends.conformance import BackendConformance, plugin
from dynamo_backends.interface.errors import OptionError
from dynamo_backends.workers.worker_process import child_environment
from tests.bench.programs import ROOT
from tests.conformance import planted

HEAD = """
from dynamo_backends.conformance import BackendConformance

ONLY = ("operators in place change*", "an input returned*", "changed: in place")
"""

FILE = f"""{HEAD}
class TestForgetful(BackendConformance):
    only = ONLY
    backend = "{planted.__name__}:forgetful"
    known_failures = {{
        "semantics/operators in place change the callers tensors": "it copies its inputs",
        "weights/changed: in place": "it does not",
    }}

class TestCrashing(BackendConformance):
    backend = "{planted.__name__}:crashing"
    only = ONLY[2:]
"""

HANGING = f"""{HEAD}
class TestHanging(BackendConformance):
    backend = "{planted.__name__}:hanging"
    only = ONLY
"""


def run(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_mine.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", plugin.__name__, "-q", "-rA", "--tb=line",
               "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(folder)]  # fmt: skip
    return subprocess.run(
        [*command, *arguments, str(folder)],
        cwd=ROOT,
        # Once: whether or not the entry point is installed here.
        env=child_environment() | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def lines(output: str) -> set[str]:
    """Such as "PASSED TestRight weights/changed: in place"."""
    found = re.findall(r"^(PASSED|FAILED|XFAIL|SKIPPED) \S+?::(\w+)::test_check\[(.+?)\]",
                       output, re.MULTILINE)  # fmt: skip
    return {" ".join(each) for each in found}


def test_each_check_is_a_test_and_crashes_are_failures(tmp_path: Path):
    done = run(tmp_path, FILE)
    mutates = "semantics/operators in place change the callers tensors"
    returned = "semantics/an input returned as it is"
    changed = "weights/changed: in place"
    assert lines(done.stdout) == {
        f"XFAIL TestForgetful {mutates}",
        f"PASSED TestForgetful {returned}",
        f"FAILED TestForgetful {changed}",
        f"FAILED TestCrashing {changed}",
    }, done.stdout + done.stderr
    assert "this check passes; remove it from known_failures (it does not)" in done.stdout
    assert "crash: the process died of SIGABRT" in done.stdout
    assert done.returncode == 1


def test_options_choose_groups_and_the_time(tmp_path: Path):
    groups = ("--conformance-groups", "weights", "--conformance-time-limit", "1")
    done = run(tmp_path, HANGING, *groups)
    assert lines(done.stdout) == {"FAILED TestHanging weights/changed: in place"}, done.stdout
    assert "timeout: did not finish within 1 s" in done.stdout


def collect(tests: BackendConformance, **options: object) -> None:
    """Has a class make its tests, as pytest does."""
    config = SimpleNamespace(getoption=lambda name, default: options.get(name, default))
    found: Any = SimpleNamespace(
        fixturenames=["conformance_check"], config=config, parametrize=lambda *_, **__: None
    )
    tests.pytest_generate_tests(found)


def test_an_unknown_group_is_an_error():
    class Mine(BackendConformance):
        backend = f"{planted.__name__}:right"

    collect(Mine(), conformance_groups="weights")
    text = "unknown group wieghts; valid groups: operators, gradients"
    with pytest.raises(pytest.UsageError, match=text):
        collect(Mine(), conformance_groups="wieghts")


def test_a_known_failure_of_no_check_is_an_error():
    class Mine(BackendConformance):
        backend = f"{planted.__name__}:right"
        known_failures: ClassVar[Mapping[str, str]] = {"weights/changed: in plaice": "a typo"}

    text = "known_failures names no check: weights/changed: in plaice"
    with pytest.raises(OptionError, match=text):
        collect(Mine())


def test_the_plugin_is_an_entry_point_and_loads_nothing():
    described = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    points = described["project"]["entry-points"]["pytest11"]
    assert points == {"dynamo_backends": plugin.__name__}
    code = (
        f"import sys, {plugin.__name__}; print({{'torch', 'pytest', 'numpy'}} & {{*sys.modules}})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("name", ["full", "groups", "time_limit"])
def test_options_are_those_that_the_class_reads(name: str, pytestconfig: pytest.Config):
    source = (ROOT / "dynamo_backends/conformance/testing.py").read_text(encoding="utf-8")
    assert f'"conformance_{name}"' in source
    assert f"{plugin.PREFIX}{name.replace('_', '-')}" in source
