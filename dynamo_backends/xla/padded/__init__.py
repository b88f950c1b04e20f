"""Executables for static shapes that serve all smaller sizes: inputs are padded to a bound."""
