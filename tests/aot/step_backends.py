"""The backends that tests of steps take; Inductor, which compiles C++, in turn.

`test_step_optimizers`, `test_step_crashes` and `tests/inductor` have it always.
"""

import pytest

INDUCTOR = pytest.param("inductor", marks=pytest.mark.long)
BACKENDS = ("aot_eager", "openxla", INDUCTOR)
