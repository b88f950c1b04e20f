"""Compiles a captured graph: passes, partitioning, backend, program."""
