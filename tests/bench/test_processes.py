import gc

import numpy as np
import pytest

from harness import (
    ChildError,
    call_apart,
    peak_rss_bytes,
    reset_peak_rss,
    result_apart,
    rss_bytes,
    run_child,
)
from harness.arguments import named_models
from harness.calls import milliseconds
from tests.bench.programs import load

HEAD = "import os\nfrom harness.processes import hand_back\n"


def test_values_come_back_beside_other_output() -> None:
    code = HEAD + "print('noise')\nhand_back(x=1.5, y=os.environ['GIVEN'])\nprint('more noise')"
    assert run_child(["-c", code], {"GIVEN": "here"}) == {"x": 1.5, "y": "here"}


def test_failure_shows_what_the_child_said() -> None:
    with pytest.raises(ChildError, match=r"exit status 1\n(.|\n)*ValueError: bad luck"):
        run_child(["-c", HEAD + "hand_back(x=1)\nraise ValueError('bad luck')"])


def test_functions_of_programs_are_called_apart() -> None:
    assert call_apart(milliseconds, [1.0, 3.0], 50, 100) == [2000.0, 3000.0]
    batches = load("benchmarks/memory.py").batches
    assert call_apart(batches, "eager", 4, 0) == [4]


def test_what_a_failed_child_said_last_can_be_its_result() -> None:
    found = result_apart(named_models, None, ["lost"], timeout_s=60)
    assert found["error"].startswith("AttributeError: 'NoneType' object has no attribute")


def test_nothing_handed_back_is_a_failure() -> None:
    with pytest.raises(ChildError, match="exit status 0"):
        run_child(["-c", "print('nothing')"])


def test_a_child_that_hangs_is_ended() -> None:
    with pytest.raises(ChildError, match="not done after 1 s"):
        run_child(["-c", "import time; time.sleep(60)"], timeout_s=1)


def test_peak_memory_is_the_childs_own() -> None:
    ballast = np.ones(50_000_000)  # 400 MB in this process
    code = "import harness as h\nh.hand_back(peak=h.peak_rss_bytes())"
    assert run_child(["-c", code])["peak"] < peak_rss_bytes()
    assert ballast.nbytes < peak_rss_bytes()


def test_peak_stays_when_memory_is_freed_and_can_be_reset() -> None:
    before = rss_bytes()
    ballast = np.ones(20_000_000)
    assert rss_bytes() - before > 0.9 * ballast.nbytes
    size = ballast.nbytes
    del ballast
    gc.collect()
    assert peak_rss_bytes() - rss_bytes() > 0.5 * size
    if reset_peak_rss():
        assert peak_rss_bytes() - rss_bytes() < 0.5 * size
