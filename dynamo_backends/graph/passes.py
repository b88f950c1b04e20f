"""Lists the stages of the middle end, in order, with what each ensures."""

from dynamo_backends.graph.aliasing import SEPARATE_VIEWS
from dynamo_backends.graph.canonicalize import CANONICALIZE
from dynamo_backends.graph.fold_batch_norm import FOLD_BATCH_NORM
from dynamo_backends.graph.normalize import NORMALIZE
from dynamo_backends.graph.pass_sequence import PassSequence
from dynamo_backends.graph.properties import NORMAL_FORM, Property, Stage
from dynamo_backends.graph.random_draws import SEPARATE_DRAWS
from dynamo_backends.graph.shape_propagation import PROPAGATE
from dynamo_backends.graph.specialize import make_specialize_pass

# The first two are AOT Autograd's work, done in one trace.
FUNCTIONALIZE = Stage(
    name="functionalize",
    summary="in-place operations become functional; mutated inputs become outputs",
    requires=frozenset(),
    ensures=frozenset({Property.ORDERED, Property.FUNCTIONAL}),
)
DECOMPOSE = Stage(
    name="decompose",
    summary="composite operators are decomposed into supported operators",
    requires=frozenset({Property.ORDERED, Property.FUNCTIONAL}),
    ensures=frozenset({Property.DIALECT}),
)

# Once for every set of concrete shapes.
PASSES = PassSequence(
    (CANONICALIZE, SEPARATE_DRAWS, FOLD_BATCH_NORM, SEPARATE_VIEWS),
    given=NORMAL_FORM | {Property.STATIC},
)

STAGES: tuple[Stage, ...] = (
    FUNCTIONALIZE,
    DECOMPOSE,
    NORMALIZE,
    PROPAGATE,
    make_specialize_pass(()),
    *PASSES.passes,
)
