"""Loads an embedding server on this machine: some clients, each with one sentence a request.

    python examples/serve_load.py http://127.0.0.1:8000
    python examples/serve_load.py http://127.0.0.1:8000 --clients 4 --seconds 20 --lengths 5 128
    python examples/serve_load.py http://127.0.0.1:8000 --against http://127.0.0.1:8001 --rounds 4

Each client waits for an answer before it asks again, on a connection that stays open. Sentences
have random lengths, in tokens; the same ones each time. Two servers take turns, so that what else
the machine does slows both. The exit status is 1 if a request failed, or something was compiled.
"""

import argparse
import http.client
import json
import math
import random
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

WORDS = ("time", "people", "water", "day", "house", "school", "night", "music", "city", "river")
MOST_SECONDS = 120.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass
class Seen:
    """What clients saw of a server.

    Attributes:
        latencies: Seconds of each answer.
        failed: What went wrong, a text each.
        seconds: For which the server was loaded.
        processor: Seconds of processors that the server took meanwhile; not a number if it does
            not say.
    """

    latencies: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    processor: float = 0.0

    @property
    def throughput(self) -> float:
        """Answers a second."""
        return len(self.latencies) / self.seconds

    def quantile(self, percent: int) -> float:
        """Of the latencies, in milliseconds."""
        return 1e3 * sorted(self.latencies)[len(self.latencies) * percent // 100]

    def __str__(self) -> str:
        """In one line."""
        if not self.latencies:
            return "no answers"
        shown = [f"{self.throughput:.1f} requests a second"]
        shown += [f"p{q} {self.quantile(q):.1f} ms" for q in (50, 95, 99)]
        if not math.isnan(self.processor):
            each = 1e3 * self.processor / len(self.latencies)
            shown.append(f"{each:.1f} s of processors for 1000")
        return ", ".join(shown)


class Client(threading.Thread):
    """Asks again and again.

    Args:
        url: Of the server.
        seed: Which the client's sentences depend on.
        lengths: The fewest and the most tokens.
        until: When it ends, on the clock `time.perf_counter`.
        seen: Gets what it sees.
    """

    def __init__(self, url: str, seed: str, lengths: tuple[int, int], until: float, seen: Seen):
        super().__init__(daemon=True)
        self._seen = seen
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
        self._random = random.Random(seed)
        self._lengths = lengths
        self._until = until

    def run(self) -> None:
        """See `threading.Thread`."""
        while (start := time.perf_counter()) < self._until:
            try:
                (vector,) = self._vectors([self._sentence()])
                if not abs(sum(x * x for x in vector) - 1) < 1e-3:
                    raise ValueError("the vector's length is not 1")
                self._seen.latencies.append(time.perf_counter() - start)
            except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
                self._seen.failed.append(str(error) or type(error).__name__)
                self._connection.close()
                time.sleep(0.1)
        self._connection.close()

    def _vectors(self, sentences: Sequence[str]) -> list[list[float]]:
        body = json.dumps({"sentences": sentences})
        self._connection.request("POST", "/embed", body)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != http.HTTPStatus.OK:
            raise ValueError(f"status {answer.status}: {content[:200]!r}")
        found: list[list[float]] = json.loads(content)["vectors"]
        return found

    def _sentence(self) -> str:
        tokens = self._random.randint(*self._lengths)
        return " ".join(self._random.choices(WORDS, k=max(tokens - 2, 1)))  # one begins, one ends


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the clients and prints what they saw."""
    settings = parse(arguments)
    urls = [url.rstrip("/") for url in (settings.url, settings.against) if url]
    for url in urls:
        if urlsplit(url).hostname not in LOOPBACK:
            print(f"{url} is not on this machine; valid are {', '.join(LOOPBACK)}", file=sys.stderr)
            return 2
    seen = {url: Seen() for url in urls}
    seconds = min(settings.seconds, MOST_SECONDS / len(urls)) / settings.rounds
    for number in range(settings.rounds):
        for url in urls:
            load(url, seen[url], settings.clients, tuple(settings.lengths), seconds, number)
    good = [reported(url, seen[url]) for url in urls]
    if len(urls) > 1 and all(each.latencies for each in seen.values()):
        one, other = seen.values()
        ratios = one.throughput / other.throughput, one.quantile(95) / other.quantile(95)
        print("{:.2f} times the requests, {:.2f} times the p95".format(*ratios))
    return 0 if all(good) else 1


def load(
    url: str, seen: Seen, clients: int, lengths: tuple[int, int], seconds: float, number: int
) -> None:
    """Has clients ask a server for some seconds; the number of the round tells what they ask."""
    start, before = time.perf_counter(), count(url, "process_cpu_seconds_total")
    until = start + seconds
    threads = [Client(url, f"{number} {i}", lengths, until, seen) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen.seconds += time.perf_counter() - start
    seen.processor += count(url, "process_cpu_seconds_total") - before


def reported(url: str, seen: Seen) -> bool:
    """Prints what was seen of a server; whether it is as it should be."""
    print(f"{url}: {seen}")
    for text in seen.failed[:3]:
        print(f"failed: {text}", file=sys.stderr)
    compiled = count(url, "embed_compiled_total")
    print(f"{len(seen.latencies)} answers, {len(seen.failed)} failures, {compiled:g} compilations")
    return bool(seen.latencies) and not seen.failed and compiled == 0


def count(url: str, name: str) -> float:
    """A number of the server's /metrics; not a number if it does not say."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return math.nan
    found = (line.split()[-1] for line in lines if line.startswith(f"{name} "))
    return float(next(found, math.nan))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--against", metavar="URL", help="another server, to compare with")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0,
                        help=f"for each server; {MOST_SECONDS:g} at most for all")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=1, help="so many turns share the seconds")
    parser.add_argument("--lengths", type=int, nargs=2, default=[5, 128], metavar="TOKENS")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
