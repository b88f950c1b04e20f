"""Whether a backend can run here, asked so that a check that fails ends nothing."""

import logging

from dynamo_backends.interface.backend import Availability, Backend
from dynamo_backends.interface.errors import BackendUnavailableError, brief_error

log = logging.getLogger("dynamo_backends")


def availability_of(backend: Backend) -> Availability:
    """Returns whether a backend can run here; one that fails to tell cannot."""
    try:
        return backend.availability()
    except Exception as error:
        log.debug("asking %s failed", backend.name, exc_info=True)
        return Availability(False, f"its check failed ({brief_error(error)})", "please report this")


def require_available(backend: Backend) -> None:
    """Raises `BackendUnavailableError` if the backend cannot run here."""
    available = backend.availability()
    if not available.usable:
        remedy = f" To mend it: {available.remedy}" if available.remedy else ""
        raise BackendUnavailableError(
            f"backend {backend.name!r} cannot run here: {available.reason}.{remedy}"
        )
