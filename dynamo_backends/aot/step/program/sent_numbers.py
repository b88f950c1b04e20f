"""The numbers of a step, which are given anew each time, where its graph reads them."""

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

CPU = torch.device("cpu")


class SentNumbers:
    """The numbers as a tensor; to another device than the host they are sent when they change.

    Args:
        device: Where the graph reads them.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._sent: tuple[bytes, Tensor] | None = None

    def __call__(self, numbers: Sequence[float]) -> Tensor:
        """Returns the tensor, float64; not to be written to."""
        if self._device == CPU:
            return torch.tensor(numbers, dtype=torch.float64)
        given = struct.pack(f"{len(numbers)}d", *numbers)
        sent = self._sent
        if sent is None or sent[0] != given:  # as bytes: -0.0 equals 0.0
            sent = given, torch.tensor(numbers, dtype=torch.float64, device=self._device)
            self._sent = sent
        return sent[1]
