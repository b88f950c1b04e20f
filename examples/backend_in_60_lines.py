"""A backend of your own: ATen calls become numpy functions, which read torch's memory.

    python examples/backend_in_60_lines.py

The table that lowers calls also says which ones are taken; all others stay in eager. To write your
own, copy the file and replace the table and what runs it by your compiler. With an entry point in
your package's pyproject.toml, `torch.compile(model, backend="numpy")` works without an import:

    [project.entry-points.torch_dynamo_backends]
    numpy = "backend_in_60_lines:on_numpy"
"""

import numpy as np
import torch
from torch import fx, nn

import dynamo_backends as db

aten = torch.ops.aten
TABLE = {
    aten.add.Tensor: lambda x, y, alpha=1: x + alpha * y,
    aten.addmm.default: lambda bias, x, y, beta=1, alpha=1: beta * bias + alpha * (x @ y),
    aten.mm.default: np.matmul,
    aten.mul.Tensor: np.multiply,
    aten.permute.default: np.transpose,
    aten.sub.Tensor: lambda x, y, alpha=1: x - alpha * y,
    aten.tanh.default: np.tanh,
}


def compute(node, values):
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    return np.asarray(TABLE[node.target](*args, **kwargs), np.float32)


class OnNumpy(db.Executable):
    def __init__(self, graph):
        self.graph = graph

    def bind(self, weights):
        graph, places, as_promised = self.graph, self.graph.placeholders, db.Results(self.graph)
        fixed = {places[i]: w.detach().numpy() for i, w in zip(graph.weights, weights, strict=True)}
        for node in graph.calls:  # what reads nothing but weights is computed now, and kept
            if node.all_input_nodes and all(n in fixed for n in node.all_input_nodes):
                fixed[node] = compute(node, fixed).copy()
        copied = [k for k, i in enumerate(graph.weights) if fixed.keys() & places[i].users]

        def run(inputs):
            given = zip(graph.activations, inputs, strict=True)
            values = fixed | {places[i]: x.detach().numpy() for i, x in given}
            for node in graph.calls:
                values[node] = fixed[node] if node in fixed else compute(node, values)
            found = [torch.tensor(values[x]) if x in values else x for x in graph.outputs]
            return as_promised(found)

        return run, copied


class Numpy(db.Backend):
    name = "numpy"

    def availability(self):
        return db.Availability(True, f"numpy {np.__version__}", devices=("cpu",))

    def supports(self, node, options):
        if node.target not in TABLE:
            return db.Support(False, "the table has no row for it")
        for value in (n.meta["val"] for n in (node, *node.all_input_nodes)):
            if value.device.type != "cpu" or value.dtype != torch.float32:
                return db.Support(False, f"the table is not for {value.dtype} on {value.device}")
        return db.SUPPORTED

    def compile(self, graph, options):
        return OnNumpy(graph)


db.register_backend("numpy", Numpy)
on_numpy = db.compiler("numpy", min_block_size=1)

if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    x, compiled = torch.randn(9, 4), torch.compile(model, backend=on_numpy)
    with torch.no_grad():
        print("results are eager's:", torch.allclose(compiled(x), model(x), atol=1e-6))
        model[0].weight.mul_(2)
        print("and after a weight has changed:", torch.allclose(compiled(x), model(x), atol=1e-6))
    ours, eagers = (torch.autograd.grad(run(x).sum(), model[0].weight) for run in (compiled, model))
    print("gradients are eager's:", torch.allclose(*ours, *eagers, atol=1e-6))
    print(db.explain(model, x, backend=on_numpy))
