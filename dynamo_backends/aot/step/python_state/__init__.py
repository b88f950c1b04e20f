"""Python state that a traced step reads and writes outside of tensors."""
