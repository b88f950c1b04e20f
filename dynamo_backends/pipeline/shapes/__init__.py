"""Which program of a captured graph serves which sizes."""
