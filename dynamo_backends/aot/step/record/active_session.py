"""The call of a step that a thread is in: what is patched in torch asks for it."""

import threading
from typing import Any

from dynamo_backends.aot.step.record.session import Session
from dynamo_backends.aot.step.record.transforms import TransformedCalls

_thread = threading.local()


def current_session() -> Session | None:
    """Returns the call of a step that this thread is in."""
    session: Session | None = getattr(_thread, "session", None)
    return session


def set_session(session: Session | None) -> None:
    """Begins a call of a step in this thread, or ends it."""
    _thread.session = session


def active_session() -> Session | None:
    """Returns the call of a step that this thread is in, if its torch calls are followed."""
    session = current_session()
    return session if session is not None and session.is_active else None


def session_of_region() -> Session | None:
    """As `active_session`, or that of a checkpointed region that goes on in eager."""
    session = current_session()
    return session if session is not None and session.is_active_or_in_region else None


def open_transforms() -> TransformedCalls | None:
    """Returns the transforms of torch.func that this thread's step is in."""
    session = current_session()
    return session.transforms if session is not None and session.transforms.is_open else None


def note_collection(phase: str, info: Any) -> None:
    """Called by Python when it begins and ends to collect garbage, in the thread that does so."""
    session = current_session()
    if session is not None:
        session.collecting = phase == "start"
