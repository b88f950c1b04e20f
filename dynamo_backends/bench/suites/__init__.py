"""Models to test and measure compilers with, grouped into suites."""

from dynamo_backends.bench.suites.case import Inputs, ModelCase, Scale, call
from dynamo_backends.bench.suites.catalogue import SUITES, find_case, find_cases, suite
from dynamo_backends.bench.suites.unet import UNet
from dynamo_backends.bench.suites.weights import randomize_weights

__all__ = [
    "SUITES",
    "Inputs",
    "ModelCase",
    "Scale",
    "UNet",
    "call",
    "find_case",
    "find_cases",
    "randomize_weights",
    "suite",
]
