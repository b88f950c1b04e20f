"""Enumerations with the vendor's members; values differ between versions, as the vendor's do."""

import enum


class Severity(enum.IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class DataType(enum.IntEnum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8


class TensorLocation(enum.IntEnum):
    DEVICE = 0
    HOST = 1


class MemoryPoolType(enum.IntEnum):
    WORKSPACE = 0


class HardwareCompatibilityLevel(enum.IntEnum):
    NONE = 0
    AMPERE_PLUS = 1
    SAME_COMPUTE_CAPABILITY = 2


class ExecutionContextAllocationStrategy(enum.IntEnum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class SerializationFlag(enum.IntEnum):
    EXCLUDE_WEIGHTS = 0
    EXCLUDE_LEAN_RUNTIME = 1
    INCLUDE_REFIT = 2


class ErrorCode(enum.IntEnum):
    SUCCESS = 0
    INTERNAL_ERROR = 1
    MODEL_DESERIALIZE_FAILED = 3
    INVALID_GRAPH = 5
    UNSUPPORTED_NODE = 8
    UNSUPPORTED_NODE_DATATYPE = 11
    REFIT_FAILED = 14


class BuilderFlag10(enum.IntEnum):
    FP16 = 0
    REFIT = 4
    TF32 = 6
    VERSION_COMPATIBLE = 13
    BF16 = 17
    STRIP_PLAN = 19
    WEIGHT_STREAMING = 21
    STRICT_NANS = 24


class BuilderFlag11(enum.IntEnum):
    REFIT = 4
    TF32 = 6
    VERSION_COMPATIBLE = 12
    STRIP_PLAN = 18
    WEIGHT_STREAMING = 20
    STRICT_NANS = 23


class NetworkDefinitionCreationFlag10(enum.IntEnum):
    EXPLICIT_BATCH = 0
    STRONGLY_TYPED = 1


class NetworkDefinitionCreationFlag11(enum.IntEnum):
    STRONGLY_TYPED = 0
