"""Whether a partition is worth its price.

Handing a block over to a backend costs time whatever the block computes: inputs and outputs change
hands and the program runner takes another step. Measured on CPUs (`benchmarks/fragments.py`), that
is 65 to 75 µs, what ten to twenty operators on small tensors cost in eager. So a graph is
fragmented when it has at least four blocks and they do, on average, less work than ten small
operators. A call counts as

- one operator, plus one for each 64 KiB that it writes (about what a core writes in the time that
  one small operator takes), and
- ten if it is a matrix product, a convolution or attention: there a backend may gain something
  however small the block.
"""

from torch import fx

from dynamo_backends._torch_private import OpOverload, counts_flops
from dynamo_backends.graph.liveness import tensor_bytes
from dynamo_backends.graph.partition import Partition, count_ops

MANY_BLOCKS = 4
BLOCK_COST = 10.0  # in small operators
_BYTES_PER_OPERATOR = 64 * 1024


def fragmentation(split: Partition) -> str | None:
    """Why a partition costs more than it saves, such as "12 blocks of 3 operators on average".

    Requires: static shapes.

    Returns:
        The reason, or None if the blocks are worth it.
    """
    blocks = [part.graph.calls for part in split.parts if part.on_backend]
    if len(blocks) < MANY_BLOCKS:
        return None
    work = sum(operator_work(node) for nodes in blocks for node in nodes) / len(blocks)
    if work >= BLOCK_COST:
        return None
    size = sum(map(count_ops, blocks)) / len(blocks)
    return (
        f"{len(blocks)} blocks of {size:.3g} operators on average, each with the work of "
        f"{work:.2g} small ones, while handing over a block costs about {BLOCK_COST:.0f}"
    )


def operator_work(node: fx.Node) -> float:
    """What a call costs in eager, in operators on small tensors."""
    op = node.target
    if not isinstance(op, OpOverload):
        return 0.0
    if counts_flops(op):
        return BLOCK_COST
    written = 0 if op.is_view else tensor_bytes(node.meta.get("val"))
    return 1.0 + written / _BYTES_PER_OPERATOR
