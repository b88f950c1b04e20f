"""A process of its own that compiles a model with the double, and prints what happened.

`python -m tests.trt.process <major version of TensorRT> <name of the GPU>`
"""

import json
import sys

import torch

import dynamo_backends
from dynamo_backends.trt import device as seam
from tests.doubles.tensorrt import HostDevice, make
from tests.trt.helpers import net


def main(major: int, gpu: str) -> None:
    host = HostDevice()
    host.name = gpu
    module = make(major, host)
    sys.modules["tensorrt"] = module
    seam._driver = host
    torch.manual_seed(0)
    model, x = net(), torch.randn(4, 6)
    with torch.no_grad(), dynamo_backends.record() as reports:
        result = torch.compile(model, backend="tensorrt")(x)
        wrong = (result - model(x)).abs().max().item()
    log = module.double
    print(json.dumps({
        "builds": len(log.builds), "loads": log.loads, "refits": len(log.refits),
        "cache_hits": reports[0].cache_hits, "wrong": wrong,
    }))  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
