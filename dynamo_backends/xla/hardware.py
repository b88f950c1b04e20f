"""Which devices and vendor libraries are here, and what compiled code for them depends on."""

import functools
import os

import torch

from dynamo_backends.interface.packages import is_there


@functools.cache
def has_tpu() -> bool:
    """Whether there are a TPU and the library for it, which jax finds in these two places."""
    if not is_there("libtpu") and "TPU_LIBRARY_PATH" not in os.environ:
        return False
    from dynamo_backends.xla._jaxlib import tpu_chips

    return tpu_chips() > 0


def has_cuda_plugin() -> bool:
    """Whether jax can use CUDA devices."""
    names = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_plugins.xla_cuda13")
    return any(map(is_there, names))


@functools.cache
def gpus() -> str:
    """What machine code for CUDA devices depends on; empty without any."""
    if not torch.cuda.is_available() or not has_cuda_plugin():
        return ""
    count = torch.cuda.device_count()
    names = [f"{torch.cuda.get_device_name(i)} {torch.cuda.get_device_capability(i)}"
             for i in range(count)]  # fmt: skip
    return f"{names}"


@functools.cache
def tpu() -> str:
    """The chip that machine code for the TPU depends on."""
    from dynamo_backends.xla.runtime import open_device

    handle = open_device("tpu").handle
    return f"{handle.device_kind} {handle.client.platform_version}"
