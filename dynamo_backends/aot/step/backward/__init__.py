"""Backward passes that stop where user code has its turn: hooks, checkpoints, an engine."""
