"""Provides what tuning needs: races, a budget, progress, counts, worker processes.

`autotune` chooses among backends with it, `tvm` among schedules.
"""
