"""Training steps on several devices: XLA's partitioner splits one program over all of them."""
