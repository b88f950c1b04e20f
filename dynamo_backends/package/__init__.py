"""Packages: a compiled model in one file, which other processes load without compiling."""

from dynamo_backends.package.loading import load
from dynamo_backends.package.module import PackagedModule
from dynamo_backends.package.saving import save

__all__ = ["PackagedModule", "load", "save"]
