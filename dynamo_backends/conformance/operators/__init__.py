"""PyTorch's own database of operators, with sample inputs, through a backend."""
