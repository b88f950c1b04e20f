"""TVM's packages, imported without what their import does to the process.

It installs a handler for segmentation faults and wraps `sys.excepthook` by a function that ends all
of the process's children (those of `multiprocessing`) whenever an exception is not caught.
"""

import contextlib
import ctypes
import signal
import sys
from collections.abc import Iterator

_ROOM = 1024  # bytes; more than any system's `struct sigaction`


@contextlib.contextmanager
def _process_as_before() -> Iterator[None]:
    hook = sys.excepthook
    handler = ctypes.create_string_buffer(_ROOM)
    sigaction = getattr(ctypes.CDLL(None), "sigaction", None)
    known = sigaction is not None and sigaction(signal.SIGSEGV, None, handler) == 0
    try:
        yield
    finally:
        sys.excepthook = hook
        if known and sigaction is not None:
            sigaction(signal.SIGSEGV, handler, None)


with _process_as_before():
    import tvm
    from tvm import relax, te, topi
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter
    from tvm_ffi import structural_hash

__all__ = ["ExportedProgramImporter", "relax", "structural_hash", "te", "topi", "tvm"]
