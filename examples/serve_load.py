"""Loads an embedding server on this machine: some clients, each with one sentence a request.

    python examples/serve_load.py http://127.0.0.1:8000
    python examples/serve_load.py http://127.0.0.1:8000 --clients 4 --seconds 20 --lengths 5 128

Each client waits for an answer before it asks again. Sentences have random lengths, in tokens; the
same ones each time. The exit status is 1 if a request failed, or something was compiled.
"""

import argparse
import json
import random
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from urllib.parse import urlsplit

WORDS = ("time", "people", "water", "day", "house", "school", "night", "music", "city", "river")
MOST_SECONDS = 120.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Client(threading.Thread):
    """Asks again and again.

    Args:
        url: Of the server.
        number: Of the client, which its sentences depend on.
        lengths: The fewest and the most tokens.
        until: When it ends, on the clock `time.perf_counter`.

    Attributes:
        latencies: Seconds of each answer.
        failed: What went wrong, a text each.
    """

    def __init__(self, url: str, number: int, lengths: tuple[int, int], until: float):
        super().__init__(daemon=True)
        self.latencies: list[float] = []
        self.failed: list[str] = []
        self._url = f"{url}/embed"
        self._random = random.Random(number)
        self._lengths = lengths
        self._until = until

    def run(self) -> None:
        """See `threading.Thread`."""
        while (start := time.perf_counter()) < self._until:
            body = json.dumps({"sentences": [self._sentence()]}).encode()
            try:
                with urllib.request.urlopen(self._url, body, timeout=30) as answer:
                    (vector,) = json.load(answer)["vectors"]
                if not abs(sum(x * x for x in vector) - 1) < 1e-3:
                    raise ValueError("the vector's length is not 1")
                self.latencies.append(time.perf_counter() - start)
            except (OSError, ValueError, KeyError) as error:
                self.failed.append(str(error))
                time.sleep(0.1)

    def _sentence(self) -> str:
        tokens = self._random.randint(*self._lengths)
        return " ".join(self._random.choices(WORDS, k=max(tokens - 2, 1)))  # one begins, one ends


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the clients and prints what they saw."""
    settings = parse(arguments)
    url = settings.url.rstrip("/")
    if urlsplit(url).hostname not in LOOPBACK:
        print(f"{url} is not on this machine; valid are {', '.join(LOOPBACK)}", file=sys.stderr)
        return 2
    start = time.perf_counter()
    until = start + min(settings.seconds, MOST_SECONDS)
    clients = [Client(url, i, tuple(settings.lengths), until) for i in range(settings.clients)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    seconds = time.perf_counter() - start
    latencies = sorted(x for client in clients for x in client.latencies)
    failed = [text for client in clients for text in client.failed]
    if latencies:
        shown = [f"p{q} {1e3 * latencies[len(latencies) * q // 100]:.1f} ms" for q in (50, 95, 99)]
        print(f"{len(latencies) / seconds:.1f} requests a second, {', '.join(shown)}")
    for text in failed[:3]:
        print(f"failed: {text}", file=sys.stderr)
    compiled = seen(url, "embed_compiled_total")
    print(f"{len(latencies)} answers, {len(failed)} failures, {compiled} compilations")
    return 0 if latencies and not failed and compiled == 0 else 1


def seen(url: str, name: str) -> int | None:
    """A count of the server's /metrics; None if it does not say."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return None
    return next((int(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), None)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0, help=f"at most {MOST_SECONDS:g}")
    parser.add_argument("--lengths", type=int, nargs=2, default=[5, 128], metavar="TOKENS")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
