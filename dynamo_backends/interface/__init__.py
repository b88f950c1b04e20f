"""Defines what a backend is, and the options, errors, reports and names that all layers share."""
