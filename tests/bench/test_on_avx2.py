"""Benchmarks run as on a processor with AVX2 and nothing newer."""

from pathlib import Path

import pytest

from tests.bench.programs import ROOT, load

TEXT = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Some Processor
flags\t\t: fpu avx avx2 avx512f avx512_vnni avx_vnni amx_tile gfni fma cpuid_fault avx512_fp16
"""

CHILD = """
import os, subprocess, sys, threading, torch
from dynamo_backends.runtime.cpu_info import processor_class, processor_name
print(torch.backends.cpu.get_cpu_capability(), processor_class(), "|", processor_name())
other = "import torch; print(torch.cpu._is_avx2_supported(), torch.cpu._is_avx512_supported())"
ask = [sys.executable, "-c", other], ["gcc", "-march=native", "-dM", "-E", "-xc", "/dev/null"]
print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
threading.Thread(target=lambda: [subprocess.run(command) for command in ask]).start()
"""


def test_newer_flags_are_taken_out() -> None:
    limited = load("benchmarks/on_avx2.py").limited(TEXT)
    assert "model name\t: Some Processor, limited to AVX2\n" in limited
    assert limited.splitlines()[-1] == "flags\t\t: fpu avx avx2 fma cpuid_fault "


def test_what_cannot_be_limited_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = load("benchmarks/on_avx2.py")
    monkeypatch.setattr(program, "CPUINFO", tmp_path / "cpuinfo")
    assert program.main(["x.py"]) == 2
    (tmp_path / "cpuinfo").write_text(TEXT.replace("cpuid_fault", ""))
    assert program.main(["x.py"]) == 2
    assert "cannot have CPUID fault" in capsys.readouterr().out


def test_libraries_threads_and_child_processes_see_avx2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "of other processors")
    program = load("benchmarks/on_avx2.py")
    if not program._FAULTS.search(program.CPUINFO.read_text()):
        pytest.skip("this processor or system cannot have CPUID fault")
    child = tmp_path / "child.py"
    child.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{CHILD}")
    assert program.main([str(child)]) == 0
    first, folder, second, *compiler = capfd.readouterr().out.splitlines()
    assert first.startswith("AVX2 x86_64 avx2 | ")
    assert first.endswith("limited to AVX2")
    assert folder != "of other processors"
    assert second == "True False"
    assert "#define __AVX2__ 1" in compiler
    assert "#define __AVX512F__ 1" not in compiler
