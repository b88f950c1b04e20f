"""Runs another benchmark as on a processor with AVX2 and nothing newer.

    python benchmarks/on_avx2.py benchmarks/training.py --models resnet50 bert
    python benchmarks/on_avx2.py dynamo_backends/cli/__main__.py bench classic

The variables of single libraries (ONEDNN_MAX_CPU_ISA, ATEN_CPU_CAPABILITY, XLA's flag
xla_cpu_max_isa) do not limit all of them: XLA's products come from YNNPACK, which asks the
processor itself. So CPUID is made to fault in the program, its threads and its child processes, and
answers without AVX-512 and AMX (harness/avx2.c). Caches, clock rate, memory and the AVX2 units are
those of this processor. It takes Linux, x86-64, gcc and a processor with the flag `cpuid_fault`,
which Intel's have; elsewhere the exit status is 2.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.kept import RUNNER

SOURCE = Path(__file__).parent / "harness" / "avx2.c"
CPUINFO = Path("/proc/cpuinfo")
_NEWER = re.compile(r"\b(avx512\w*|amx_\w+|avx_vnni\w*|avx_ifma|gfni)\b *")
_NAME = re.compile(r"^(model name\s*: .*)$", re.MULTILINE)
_FAULTS = re.compile(r"^flags\s*:.*\bcpuid_fault\b", re.MULTILINE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status, and 2 if CPUID cannot be limited here."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    settings = parser.parse_args(arguments)
    cpuinfo = CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""
    if not _FAULTS.search(cpuinfo):
        print("This processor or system cannot have CPUID fault (cpuid_fault in /proc/cpuinfo).")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        library, shown = Path(folder, "avx2.so"), Path(folder, "cpuinfo")
        command = ["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{SOURCE.name} cannot be compiled: {error}")
            return 2
        shown.write_text(limited(cpuinfo), encoding="utf-8")
        more = {"LD_PRELOAD": str(library), "AVX2_CPUINFO": str(shown)}
        more[RUNNER] = f"python benchmarks/{Path(__file__).name}"
        # Graphs that torch's Inductor keeps are not told apart by vectors: with loops for those of
        # AVX-512 they would be wrong here.
        more["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "inductor"))
        program = [sys.executable, settings.program, *settings.arguments]
        return subprocess.run(program, env={**os.environ, **more}, check=False).returncode


def limited(cpuinfo: str) -> str:
    """The text of /proc/cpuinfo of such a processor; its name says that it is limited."""
    return _NAME.sub(r"\1, limited to AVX2", _NEWER.sub("", cpuinfo))


if __name__ == "__main__":
    raise SystemExit(main())
