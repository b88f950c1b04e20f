"""What tuning needs, whoever tunes: races, a budget, progress, counts, processes to try things in.

`autotune` chooses among backends with it, `tvm` among schedules.
"""
