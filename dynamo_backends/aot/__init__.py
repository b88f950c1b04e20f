"""AOT Autograd: forward and backward graphs, and whole training steps (`aot.step`)."""
