"""The state of torch's generators."""

import torch
from torch import Tensor


def snapshot_rng() -> tuple[Tensor, list[Tensor]]:
    """Returns the state of torch's CPU and CUDA generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda


def restore_rng(state: tuple[Tensor, list[Tensor]]) -> None:
    """Puts back what `snapshot_rng` returned."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
