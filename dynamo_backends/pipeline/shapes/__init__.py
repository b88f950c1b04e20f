"""Decides which program of a captured graph serves which sizes."""
