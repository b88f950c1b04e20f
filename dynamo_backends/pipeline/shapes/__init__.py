"""Chooses which program of a captured graph runs a call's sizes."""
