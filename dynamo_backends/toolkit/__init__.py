"""What backends are built from: memory layouts, compiled-in weights, prologues, trials of calls."""
