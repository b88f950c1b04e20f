"""Fixtures for all tests."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dynamo_backends.pipeline import background
from dynamo_backends.pipeline.program_builder import ProgramBuilder
from tests import rotation


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="run what takes long too, and the whole operator database; rewrite its table in docs/",
    )
    parser.addoption(
        "--rotation",
        type=int,
        metavar="N",
        help="run the share of the tests that the Nth commit runs (default: this commit's)",
    )
    parser.addoption(
        "--record-seconds",
        action="store_true",
        help="write what each test takes to tests/seconds.json (run it on a quiet machine)",
    )
    parser.addoption(
        "--samples",
        type=int,
        metavar="N",
        help="with --full: at most so many samples of each operator and dtype (default: all)",
    )
    parser.addoption(
        "--dtype",
        action="append",
        metavar="NAME",
        help='with --full: only this dtype, such as "float32"; repeatable',
    )
    parser.addoption(
        "--extremes",
        action="store_true",
        help="with --full: NaN, infinities, signed zeros and bounds of integers in the samples",
    )
    parser.addoption(
        "--processes",
        type=int,
        default=2,
        metavar="N",
        help="with --full: processes that run the operator database (default: 2)",
    )
    parser.addoption(
        "--resume",
        action="store_true",
        help="with --full: go on where an earlier run stopped, and try its failures again",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Processes that share the work (pytest-xdist) have the same rotation."""
    given = config.getoption("--rotation")
    os.environ[rotation.VARIABLE] = str(rotation.rotation() if given is None else given)
    rotation.rotation.cache_clear()


def pytest_report_header(config: pytest.Config) -> str:
    """Names what repeats this run."""
    if config.getoption("--full"):
        return "all tests and parameters"
    return f"rotation {rotation.rotation()} (--rotation N: tests/rotation.py)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what another rotation runs."""
    if config.getoption("--full"):
        return
    left_out = rotation.left_out(items)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


_durations: dict[str, float] = {}
"""Seconds that tests took, with their fixtures."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _durations[report.nodeid] = _durations.get(report.nodeid, 0.0) + report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Records seconds, in the process that hands out the work."""
    is_worker = hasattr(session.config, "workerinput")
    if session.config.getoption("--record-seconds") and not is_worker:
        rotation.record(_durations)


@pytest.fixture(autouse=True, scope="session")
def _one_compiler_process() -> Iterator[None]:
    """The process that compiles beside the calls stays: to start it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(background._worker), "idle_s", 3600.0)
        yield


@pytest.fixture(autouse=True)
def _fresh_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts with seeded random numbers, no compiled code and an empty disk cache.

    Graphs are checked after every pass (see `dynamo_backends.graph.pass_sequence`).
    """
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DYNAMO_BACKENDS_CHECK", "1")
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    background.wait_until_idle(
        20
    )  # what is compiled beside the calls would go to the cache of the next test


@pytest.fixture(autouse=True)
def _unpaced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed, so that what runs does not depend on how busy the machine is.

    Tests of that say so by the mark `paced`.
    """
    if request.node.get_closest_marker("paced") is None:
        monkeypatch.setattr(ProgramBuilder, "_make_speed_check", lambda *_: None)


class _Alarms(logging.Handler):
    """Collects what verification finds wrong."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "computed a wrong result" in text:
            self.texts.append(text)


@pytest.fixture(autouse=True)
def _no_alarm(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test fails if verification finds a result wrong, for eager's would take its place.

    Tests that plant errors say so by the mark `plants_errors`.
    """
    alarms = _Alarms()
    log = logging.getLogger("dynamo_backends")
    log.addHandler(alarms)
    yield
    log.removeHandler(alarms)
    if request.node.get_closest_marker("plants_errors") is None:
        assert alarms.texts == []
