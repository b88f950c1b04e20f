"""Programs of a step: a record as a straight line, traced, functionalized, compiled, guarded."""
