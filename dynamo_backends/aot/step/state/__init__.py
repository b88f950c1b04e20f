"""The tensors and numbers that a step has besides its calls: state, settings, arguments."""
