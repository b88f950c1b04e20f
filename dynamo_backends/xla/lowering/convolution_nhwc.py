"""Channels-last convolutions for XLA, their gradients, and the choice of their programs.

    y = convolve(x, w, stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)

Inputs are ``(N, *spatial, C)``, weights have torch's layout, any number of spatial dimensions.
"""

from dynamo_backends.xla.lowering.convolution_algorithms import ConvolutionAlgorithm
from dynamo_backends.xla.lowering.convolution_rules import (
    PROGRAMS,
    RULES,
    Rule,
    choose_algorithm,
    choose_rule,
    convolve,
)
from dynamo_backends.xla.lowering.convolution_shape import ConvShape
from dynamo_backends.xla.lowering.convolution_transposed import convolve_transposed, grad_input
from dynamo_backends.xla.lowering.convolution_weight_gradient import grad_weight

__all__ = [
    "PROGRAMS",
    "RULES",
    "ConvShape",
    "ConvolutionAlgorithm",
    "Rule",
    "choose_algorithm",
    "choose_rule",
    "convolve",
    "convolve_transposed",
    "grad_input",
    "grad_weight",
]
