"""Kernels of this package for CPUs, and what chooses between them and others by measurement."""
