"""Collectives are read off XLA's text of a program."""

from dynamo_backends.interface.mesh import CollectiveSummary
from dynamo_backends.xla.mesh.compiling import collectives_of

PROGRAM = """
  %a = f32[8,4]{1,0} all-reduce(%x), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
  %b = (f64[4]{0}, s64[], pred[2]{0}) all-reduce(%x, %y, %z), channel_id=2
  ROOT %c = bf16[16]{0} all-gather(%w), dimensions={0}
  %d = (f32[2]{0}, f32[16]{0}) all-gather-start(%w), dimensions={0}
  %e = f32[16]{0} all-gather-done(%d)
  %f = c64[3]{0} collective-permute(%w)
  %g = f32[2]{0} fusion(%all-gather.1), calls=%all-reduce.2
  %h = f8e4m3fn[5]{0} reduce-scatter(%w)
"""


def test_kinds_counts_and_bytes():
    assert collectives_of(PROGRAM) == (
        CollectiveSummary("all-reduce", 2, 128 + 32 + 8 + 2),
        CollectiveSummary("all-gather", 2, 32 + 64),
        CollectiveSummary("reduce-scatter", 1, 5),
        CollectiveSummary("collective-permute", 1, 24),
    )


def test_a_program_of_one_device_has_none():
    assert collectives_of("ENTRY %main { ROOT %a = f32[2]{0} add(%x, %y) }") == ()
