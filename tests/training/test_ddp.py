"""DistributedDataParallel around a compiled module, on two processes."""

import subprocess
import sys
from pathlib import Path


def test_two_processes_train_as_in_eager(tmp_path: Path):
    command = [sys.executable, "-m", "tests.training.ddp_worker"]
    root = Path(__file__).parents[2]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "rendezvous")],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [worker.communicate(timeout=300)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(texts)
    assert all("agreed" in text for text in texts)
