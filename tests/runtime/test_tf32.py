"""What torch allows of TF32, whichever of its two interfaces was used to say so."""

from tests import refusals

PRINT = (
    "from dynamo_backends.graph.precision import read_tf32_settings, float32_matmul_precision\n"
    "a, precision = read_tf32_settings(), float32_matmul_precision()\n"
    "print(a.products, a.convolutions, a.allowed_everywhere, precision)\n"
)


def said(*settings: str) -> list[str]:
    """What is found after each setting, in a process of its own: torch cannot take all back."""
    code = "import torch\nfrom torch import backends\n" + PRINT
    return refusals.run(code + "".join(f"{s}\n{PRINT}" for s in settings)).splitlines()


def test_the_old_interface():
    assert said(
        "torch.set_float32_matmul_precision('high')",
        "backends.cudnn.allow_tf32 = False",
        "torch.set_float32_matmul_precision('medium')",
    ) == [
        "False True False highest",
        "True True True high",
        "True False False high",
        "True False False medium",
    ]


def test_the_new_interface():
    assert said(
        "backends.cuda.matmul.fp32_precision = 'tf32'",
        "backends.cudnn.conv.fp32_precision = 'ieee'",
        "backends.cuda.matmul.fp32_precision = 'ieee'",
    ) == [
        "False True False highest",
        "True True True high",
        "True False False high",
        "False False False highest",
    ]
