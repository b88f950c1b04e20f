"""A double of torch_xla: registers no backend; torch's own function "openxla" imports it.

Its source: `torch_xla/__init__.py` and `torch/_dynamo/backends/torchxla.py`.
"""
