"""Trials of single calls: whether a vendor computes what torch does."""
