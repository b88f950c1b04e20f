"""Capture of steps by comparison: Python runs at every call, tensor math runs once at the end."""
