"""The processes of torch.distributed that take steps together, and what becomes of each."""
