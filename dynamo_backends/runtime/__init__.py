"""Runs compiled programs: weights, device memory, disk cache, eager fallback."""
