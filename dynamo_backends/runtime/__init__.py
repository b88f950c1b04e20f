"""What runs: programs, bound weights, memory, the disk cache."""
