"""Models to test and measure compilers with, grouped into suites."""

from harness.suites.case import Inputs, ModelCase, Scale, call
from harness.suites.catalogue import SUITES, find_case, find_cases, suite
from harness.suites.unet import UNet
from harness.suites.weights import enliven

__all__ = [
    "SUITES",
    "Inputs",
    "ModelCase",
    "Scale",
    "UNet",
    "call",
    "enliven",
    "find_case",
    "find_cases",
    "suite",
]
