"""Imports jax without a trace: jax draws from numpy's global generator while it is imported.

What imports jax first imports this module before.
"""

import numpy as np

_state = np.random.get_state()
try:
    import jax  # noqa: F401
finally:
    np.random.set_state(_state)
