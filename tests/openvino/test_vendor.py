"""OpenVINO is imported without its telemetry."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.bench.programs import ROOT

SPIES = """
import sys
seen = []
NAMES = {"os.fork", "os.forkpty", "os.posix_spawn", "socket.connect", "socket.getaddrinfo",
         "urllib.Request"}
sys.addaudithook(lambda name, _: seen.append(name) if name in NAMES else None)
"""
USE = """
import torch
x = torch.ones(3)
torch.testing.assert_close(torch.compile(lambda x: x.sin() + 1, backend="ov")(x), x.sin() + 1)
assert "openvino" in sys.modules and "openvino_telemetry" not in sys.modules
print("threads", [t.name for t in threading.enumerate() if "Pool" in t.name])
import openvino_telemetry  # whoever wants it has it
"""
DOUBLE = """
class Telemetry:
    def __init__(self, *args, **kwargs):
        print("telemetry")
    def send_event(self, *args, **kwargs):
        pass
"""


def run(code: str, home: Path, *paths: Path) -> str:
    """What code prints in a process with a home folder of its own."""
    variables = {name: value for name, value in os.environ.items() if "CI" not in name}
    path = os.pathsep.join(map(str, (ROOT, *paths)))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**variables, "HOME": str(home), "PYTHONPATH": path},
        capture_output=True, text=True, check=True, timeout=300,
    ).stdout  # fmt: skip


def test_it_sends_nothing_and_writes_nothing_into_the_home_folder(tmp_path: Path):
    (home := tmp_path / "home").mkdir()
    said = run(f"import threading\n{SPIES}{USE}print('seen', seen)", home)
    assert "threads []" in said
    assert "seen []" in said
    assert not (home / "intel").exists()


def test_openvino_alone_would_send(tmp_path: Path):
    (package := tmp_path / "openvino_telemetry").mkdir()
    (package / "__init__.py").write_text(DOUBLE)
    (package / "backend.py").write_text("backend_ga4 = None\n")
    assert "telemetry" in run("import openvino", tmp_path, tmp_path)
    ours = "import dynamo_backends.openvino.vendor"
    assert "telemetry" not in run(ours, tmp_path, tmp_path)


def test_all_modules_take_openvino_from_there():
    direct = re.compile(r"^\s*(?:from|import) (?:openvino|nncf)\b", re.MULTILINE)
    importers = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "dynamo_backends").rglob("*.py")
        if direct.search(path.read_text(encoding="utf-8"))
    ]
    folder = "dynamo_backends/openvino"
    assert sorted(importers) == [f"{folder}/quantized.py", f"{folder}/vendor.py"]
