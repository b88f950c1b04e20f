"""Names of candidates: which backends compete by default, and which may."""

from collections.abc import Mapping, Sequence

from dynamo_backends.interface.errors import OptionError, did_you_mean
from dynamo_backends.interface.registry import get_backend, list_backends, third_party_backends

ITSELF = "autotune"
EAGER = "eager"
SPLIT = "split"

# Names under which vendors' packages bring to torch what is a backend of this package.
_OF_VENDORS: Mapping[str, str] = {"openvino": "ov"}

# torch's own, and the device type that they are for; None: any.
TORCHS: Mapping[str, str | None] = {"inductor": None, "cudagraphs": "cuda"}


def by_default(device_types: Sequence[str]) -> list[str]:
    """Returns those that compete where no candidates are named, for inputs on these devices."""
    torchs = [n for n, kind in TORCHS.items() if kind is None or kind in device_types]
    names = [EAGER, *torchs, *list_backends(), *third_party_backends()]
    return [n for n in names if n not in (ITSELF, *_OF_VENDORS) and not _is_variant(n)]


def _is_variant(name: str) -> bool:
    """Returns whether another candidate runs the same code."""
    return name in list_backends() and bool(get_backend(name).same_as)


def check_names(names: Sequence[str], backend: str) -> None:
    """Checks the option `candidates`.

    Raises:
        OptionError: A name is no backend's, or autotune's own.
    """
    if not names:
        return
    from dynamo_backends._torch_private.control import torch_backends

    others = {*torch_backends(debugging=True), *third_party_backends()}
    known = sorted({EAGER, *list_backends(), *others} - {ITSELF})
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            usual = sorted({EAGER, *TORCHS, *list_backends(), *third_party_backends()})
            usual.remove(ITSELF)
            raise OptionError(
                f"option 'candidates' of {backend} names {name!r}, which is no backend to choose "
                f"from.{hint} There are: {', '.join(usual)}."
            )
