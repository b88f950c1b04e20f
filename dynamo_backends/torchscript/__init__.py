"""The backends `ts_trace`, `ofi`, `static_runtime`, `nnc` and `onednn_graph`: TorchScript."""

from dynamo_backends.interface.compiler import compiler

ts_trace = compiler("ts_trace")
ofi = compiler("ofi")
static_runtime = compiler("static_runtime")
nnc = compiler("nnc")
onednn_graph = compiler("onednn_graph")

__all__ = ["nnc", "ofi", "onednn_graph", "static_runtime", "ts_trace"]
