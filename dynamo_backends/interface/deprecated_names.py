"""Old names of members that other packages define or call."""

import warnings
from typing import Any, ClassVar


class DeprecatedNames:
    """Accepts old names of members in subclasses and from callers, with a warning.

    Attributes:
        RENAMED: Old name to present name. A subclass that defines the old one defines the present
            one, too.
    """

    RENAMED: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls, **settings: Any) -> None:
        """Gives members with old names their present names, too."""
        super().__init_subclass__(**settings)
        for old in cls.RENAMED.keys() & vars(cls).keys():
            warn_of_old_name(f"{cls.__name__}.{old}", cls.RENAMED[old])
            if cls.RENAMED[old] not in vars(cls):
                setattr(cls, cls.RENAMED[old], vars(cls)[old])

    def __getattr__(self, name: str) -> Any:
        """Finds a member by its old name."""
        if name not in type(self).RENAMED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        present = type(self).RENAMED[name]
        warn_of_old_name(f"{type(self).__name__}.{name}", present)
        return getattr(self, present)


def warn_of_old_name(old: str, present: str) -> None:
    """Warns the caller's caller of a name that the next version will not have."""
    text = f"{old} is called {present} now; the old name will go with the next version."
    warnings.warn(text, DeprecationWarning, stacklevel=3)
