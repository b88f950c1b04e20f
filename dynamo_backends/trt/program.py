"""A compiled program and its engines: one for each set of weights in use."""

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from dynamo_backends.interface.errors import CompileError
from dynamo_backends.trt.engine import Engine
from dynamo_backends.trt.engine_builder import Profile, Settings


@dataclass(frozen=True)
class Plan:
    """A built engine and what it was built from.

    Attributes:
        engine: Serialized, without weights.
        model: The ONNX model, without the weights' data.
        inputs: Names in the model, one per input of the graph; None for those that it lacks.
        outputs: Names in the model, one per output of the graph.
        profile: The shapes that it serves.
    """

    engine: bytes
    model: bytes
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    profile: Profile


class Lease:
    """The use of one engine, by all who run it with the same weights."""

    def __init__(self, engine: Engine):
        self.engine = engine


class SharedEngine:
    """Shared by the executables of all shapes that it serves.

    Args:
        plan: What was built.
        settings: What it was built for.

    Attributes:
        refits: How often an engine in use got new weights because they had changed.

    Raises:
        CompileError: TensorRT does not take the plan.
    """

    def __init__(self, plan: Plan, settings: Settings):
        self.plan = plan
        self.settings = settings
        self.refits = 0
        self._lock = threading.Lock()
        self._leases: weakref.WeakValueDictionary[tuple[int, ...], Lease] = (
            weakref.WeakValueDictionary()
        )
        self._idle: Engine | None = Engine(plan.engine, plan.model, settings)
        self.tensors = self._idle.tensors()

    def lease(self, key: tuple[int, ...], weights: Mapping[str, Tensor]) -> Lease:
        """Returns an engine with these weights.

        Args:
            key: Tells sets of weights apart: an engine in use under the same key gets the new ones.
            weights: Row-major tensors by the names in the model.

        Raises:
            CompileError: TensorRT does not take them.
        """
        with self._lock:
            lease = self._leases.get(key)
            if lease is not None:
                if weights:
                    lease.engine.refit(weights)
                    self.refits += 1
                return lease
            engine, self._idle = self._idle, None
            if engine is None:
                engine = Engine(self.plan.engine, self.plan.model, self.settings)
            engine.refit(weights)
            lease = self._leases[key] = Lease(engine)
            weakref.finalize(lease, self._return, engine).atexit = False
            return lease

    def serialize(self) -> bytes:
        """Returns the engine in use with its weights.

        Raises:
            CompileError: None is in use, or several are.
        """
        leases = list(self._leases.values())
        if len(leases) != 1:
            which = (
                "several sets of weights are in use"
                if leases
                else ("it has not run yet, or its weights were deleted")
            )
            raise CompileError(f"the engine cannot be saved: {which}")
        return leases[0].engine.serialize()

    def _return(self, engine: Engine) -> None:
        self._idle = engine
