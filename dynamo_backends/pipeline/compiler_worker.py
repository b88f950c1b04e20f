"""Runs in the compiler process: compiles the graphs that requests contain.

Requests and answers are JSON, one per line, on standard input and output.
"""

import base64
import os
import pickle
from typing import Any

import torch

from dynamo_backends._torch_private.precompile import unpack
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.planned_decomposition import compile_with_plan
from dynamo_backends.interface import protocols
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.pipeline.compiler_process import (
    CompileJob,
    encode_error,
    encode_parts,
    encode_plan,
)
from dynamo_backends.workers.worker_process import serve


def handle_request(request: dict[str, Any]) -> dict[str, Any]:
    """Runs a request's job and returns its answer; {} if it has no job."""
    if "job" not in request:
        return {}
    try:
        job: CompileJob = pickle.loads(base64.b64decode(request["job"]))  # from our parent
        backend, graph = _prepared(job)
    except Exception as error:
        return {"unable": brief_error(error)}
    try:
        with torch.no_grad():
            return _done(job, backend, graph)
    except Exception as error:
        return encode_error(error)


def _prepared(job: CompileJob) -> tuple[Backend, Graph]:
    """Returns the backend, and the graph; torch is set as in the process that asks."""
    os.environ.clear()
    os.environ.update(job.environment)
    torch.set_num_threads(job.threads)
    torch.set_float32_matmul_precision(job.precision)
    backend = get_backend(job.backend)
    if protocols.cache_key(backend, job.options) != job.cache_key:
        raise ValueError("the backend in the compiler process has another version or configuration")
    return backend, Graph(unpack(job.graph), job.kind, job.inputs)


def _done(job: CompileJob, backend: Backend, graph: Graph) -> dict[str, Any]:
    if job.task == "plan":
        return encode_plan(backend.plan(graph, job.options))
    made = compile_with_plan(
        backend, job.options, job.plan, graph, lambda copy: backend.compile(copy, job.options)
    )
    parts = made.dump()
    return (
        {"unable": "the executable cannot be serialized"} if parts is None else encode_parts(parts)
    )


def main() -> None:
    """Serves requests from standard input until it is closed."""
    serve(lambda request, _: handle_request(request))


if __name__ == "__main__":
    main()
