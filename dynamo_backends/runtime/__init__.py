"""Runs programs: bound weights, memory, the disk cache."""
