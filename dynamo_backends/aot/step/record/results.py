"""What a program has computed becomes the tensors that the user's code holds."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dynamo_backends.aot.step.record.placeholders import fulfil
from dynamo_backends.aot.step.record.segment import Segment
from dynamo_backends.aot.step.record.trie import Trie


def assign(segment: Segment, tensors: dict[int, Tensor], held: list[int]) -> None:
    """Makes ordinary tensors of the placeholders that user code holds.

    Gradients stay the objects they were: `p.grad is g`.

    Args:
        segment: A call whose program has run.
        tensors: Its outputs by their numbers; is emptied.
        held: The placeholders that user code refers to.
    """
    trie = segment.trie
    gradients = {n: target for target, n in segment.gradients.items() if n is not None}
    owners = {n: target for n, target in gradients.items() if trie.kinds[target] != "result"}
    for number in held:
        target = owners.get(number)
        if target is not None:
            owner = trie.values[target]
            tensors.pop(number, None)
            gradient = owner.grad
            fulfil(trie.values[number], gradient)
            del gradient
            owner.grad = trie.values[number]
            continue
        real = view_of(trie, number, tensors, trie.values)
        tensors.pop(number, None)
        fulfil(trie.values[number], real)
        tensors[number] = trie.values[number]
    tensors.clear()
    for number, target in gradients.items():
        if target in held and target not in owners.values():
            trie.values[target].grad = trie.values[number]
    trie.renew(held)


def view_of(trie: Trie, number: int, tensors: Mapping[int, Tensor], others: Any) -> Tensor:
    """Returns the contents of a result: where it is a view of a tensor that lives on, a view again.

    Args:
        trie: Of the record.
        number: Of the result.
        tensors: What was computed.
        others: The other tensors of the call, by their numbers.
    """
    root = trie.aliases.get(number)
    base = None
    if root is not None:
        base = tensors.get(root) if trie.kinds[root] == "result" else others[root]
    if base is None:
        return tensors[number].detach()
    assert root is not None
    spec, of_base = trie.specs[number], trie.specs[root]
    if base.stride() != of_base.stride or base.dtype is not spec.dtype:
        return tensors[number].detach()
    offset = spec.offset + int(base.storage_offset()) - of_base.offset
    return base.detach().as_strided(spec.size, spec.stride, offset)
