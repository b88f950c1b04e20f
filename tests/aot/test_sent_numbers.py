"""The numbers of a step, where its graph reads them."""

import math

import torch

from dynamo_backends.aot.step.program.record_program import CPU, SentNumbers


def test_on_the_host_each_step_has_a_tensor_of_its_own():
    sent = SentNumbers(CPU)
    first, second = sent((0.1, 2.0)), sent((0.1, 2.0))
    assert first.tolist() == [0.1, 2.0]
    assert first.dtype is torch.float64
    assert first is not second


def test_to_another_device_they_are_sent_only_when_they_change():
    sent = SentNumbers(torch.device("meta"))
    first = sent((0.1, 0.0))
    assert first.device.type == "meta"
    assert sent((0.1, 0.0)) is first
    changed = sent((0.1, -0.0))  # which equals 0.0
    assert changed is not first
    assert sent((0.1, math.nan)) is sent((0.1, math.nan))
