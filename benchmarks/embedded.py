"""A document from submission to outcome on one file, beside other queues: `make bench-embedded`.

Everything is measured in one run. Ratios are to a bare claim-and-finish loop in plain apsw
(bare.py); the peers (peers.py) run in an environment of their own, one after the other.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import apsw

from benchmarks.bare import BareQueue
from benchmarks.figures import Figure, report, seconds
from benchmarks.store import BATCH, PAYLOAD, bare_rows, drain_bare, fill
from fairturn import Queue, Submission, Worker
from fairturn.worker.events import DocumentEnded, Event

PEERS = ("huey", "litequeue", "persist-queue")
ROOT = Path(__file__).parent.parent
CUSTOMERS = 100
MEBIBYTE = 1_048_576
NOTHING, NAP = "benchmarks.handlers:nothing", "benchmarks.handlers:nap"
NOW = "benchmarks.handlers:now"
# A worker in a separate process, so that its memory can be measured.
_WORKER = """
import sys
from fairturn import Queue, Worker
Worker(Queue(sys.argv[1]), sys.argv[2], concurrency=int(sys.argv[3])).run()
"""


class Bench:
    """The measurements, each in new files."""

    def __init__(self, folder: Path, peers_python: str, *, quick: bool) -> None:
        self._folder = folder
        self._peers_python = peers_python
        self._rounds = 3 if quick else 5
        self._documents = 4_000 if quick else 20_000
        self._looks = 90 if quick else 500
        self._endless = 40_000 if quick else 2_000_000
        self._made = 0
        self.figures: list[Figure] = []

    def _file(self) -> Path:
        self._made += 1
        return self._folder / f"{self._made}.db"

    # ── Draining ─────────────────────────────────────────────────────────────────────────────────

    def drain(self, name: str, *, threads: bool, bar: float, least: int | None = None) -> float:
        """Measure documents per second, alternating between the bare loop and the worker."""
        ours, bare = [], []
        for _ in range(self._rounds):
            bare.append(self._bare_s())
            ours.append(self._worker_s(threads=threads))
        our_s, bare_s = statistics.median(ours), statistics.median(bare)
        rate = self._documents / our_s
        self.figures.append(
            Figure(
                name=f"drain {self._documents:,} with {name}, against a bare loop",
                value=bare_s / our_s,
                bar=bar,
                ours=f"{rate:,.0f}/s",
                theirs=f"{self._documents / bare_s:,.0f}/s",
            )
        )
        if least is not None:
            self.figures.append(
                Figure(
                    name=f"drain with {name}: documents a second",
                    value=rate,
                    bar=least,
                    ours=f"{rate:,.0f}/s",
                )
            )
        return rate

    def _bare_s(self) -> float:
        bare = BareQueue(self._file(), "FULL")
        for _ in range(self._documents // 1_000):
            bare.submit_many(bare_rows(1_000))
        took = seconds(lambda: drain_bare(bare, self._documents // BATCH))
        bare.close()
        return took

    def _worker_s(self, *, threads: bool) -> float:
        with Queue(self._file()) as queue:
            fill(queue, customers=CUSTOMERS, documents=self._documents)
            worker = Worker(queue, NOTHING, concurrency=os.cpu_count() or 1, threads=threads)
            took = seconds(lambda: worker.run(until_empty=True))
            assert queue.summary().waiting == 0
        return took

    def drain_peers(self, rate: float) -> None:
        """Measure the worker with threads against each peer."""
        for peer in PEERS:
            documents = self._documents // 4  # it is slow, at any number of documents
            (took,) = self._ask(peer, "drain", documents)
            theirs = documents / took
            self.figures.append(
                Figure(
                    name=f"drain with threads, against {peer}",
                    value=rate / theirs,
                    bar=1.0,
                    ours=f"{rate:,.0f}/s",
                    theirs=f"{theirs:,.0f}/s",
                )
            )

    def _ask(self, peer: str, what: str, n: int) -> list[float]:
        command = [self._peers_python, str(ROOT / "benchmarks/peers.py"), peer, what, str(n)]
        printed = subprocess.run(
            [*command, str(self._folder)], check=True, capture_output=True, text=True
        )
        answer: list[float] = json.loads(printed.stdout)
        return answer

    # ── From submission to start ─────────────────────────────────────────────────────────────────

    def latency(self) -> None:
        found: dict[str, list[float]] = {name: [] for name in ("fairturn", *PEERS)}
        looks = self._looks // self._rounds
        for _ in range(self._rounds):  # in turns, so that noise affects all of them
            found["fairturn"] += self._latencies_s(looks)
            for peer in PEERS:
                found[peer] += self._ask(peer, "latency", looks)
        p50, p99 = (percentile(sorted(found["fairturn"]), percent) for percent in (50, 99))
        self.figures.append(
            Figure(
                name="from submit to the handler's start, p50, ms",
                value=1e3 * p50,
                bar=3.0,
                at_most=True,
                ours=f"{1e3 * p50:.2f} ms",
            )
        )
        for peer in PEERS:
            theirs = percentile(sorted(found[peer]), 99)
            self.figures.append(
                Figure(
                    name=f"the same, p99, against {peer}",
                    value=p99 / theirs,
                    bar=1.0,
                    at_most=True,
                    ours=f"{1e3 * p99:.2f} ms",
                    theirs=f"{1e3 * theirs:.2f} ms",
                )
            )

    def _latencies_s(self, looks: int) -> list[float]:
        started = threading.Event()
        at = 0.0

        def handle(document: object) -> None:
            nonlocal at
            at = time.perf_counter()
            started.set()

        found = []
        chance = random.Random(1)
        with Queue(self._file()) as queue:
            worker = Worker(queue, handle, concurrency=1, threads=True)
            thread = threading.Thread(target=worker.run)
            thread.start()
            for n in range(looks):
                time.sleep(chance.uniform(0.01, 0.03))
                started.clear()
                begun = time.perf_counter()
                queue.submit(f"customer-{n % CUSTOMERS}", payload=PAYLOAD)
                started.wait()
                found.append(at - begun)
            worker.stop()
            thread.join()
        return found

    def waking(self) -> None:
        """Measure the same across processes, and the CPU time of an idle worker."""
        file = self._file()
        chance = random.Random(1)
        found = []
        idle_s = 2.0 if self._rounds == 3 else 10.0
        with Queue(file) as queue, worker_process(file, NOW, 1) as worker:
            queue.wait(queue.submit("first").id)
            for n in range(self._looks):
                time.sleep(chance.uniform(0.01, 0.06))
                begun = time.monotonic()
                id = queue.submit(f"customer-{n % CUSTOMERS}", payload=PAYLOAD).id
                queue.wait(id)
                found.append(queue.result(id) - begun)
            before = processor_s(worker.pid)
            time.sleep(idle_s)
            share = (processor_s(worker.pid) - before) / idle_s
        p99 = percentile(sorted(found), 99)
        for name, value, bar in (
            ("from submit to start across processes, p99, ms", 1e3 * p99, 50.0),
            ("an idle worker: per cent of a core", 100 * share, 1.0),
        ):
            self.figures.append(
                Figure(name=name, value=value, bar=bar, at_most=True, ours=f"{value:.2f}")
            )

    # ── Busy slots ───────────────────────────────────────────────────────────────────────────────

    def busy(self) -> None:
        """Measure the share of time that four slots run handlers of 50 ms."""
        slots, documents = 4, 200 if self._rounds == 3 else 800
        worked_s = 0.0
        first_s = last_s = 0.0

        def watch(event: Event) -> None:
            nonlocal worked_s, first_s, last_s
            if isinstance(event, DocumentEnded):
                worked_s += event.seconds
                last_s = time.perf_counter()
                first_s = first_s or last_s - event.seconds

        with Queue(self._file()) as queue:
            fill(queue, customers=CUSTOMERS, documents=documents)
            Worker(queue, NAP, concurrency=slots, on_event=watch).run(until_empty=True)
        share = worked_s / slots / (last_s - first_s)
        self.figures.append(
            Figure(
                name="50 ms documents, 4 slots: share of the slots' time that handlers run",
                value=share,
                bar=0.97,
                ours=f"{documents} documents",
            )
        )

    # ── Memory ───────────────────────────────────────────────────────────────────────────────────

    def memory(self) -> None:
        """Measure the memory of an idle worker, each shared page divided by its users (PSS)."""
        slots = 4
        file = self._file()
        with Queue(file) as queue:
            fill(queue, customers=CUSTOMERS, documents=1_000)
            with worker_process(file, NOTHING, slots) as worker:
                wait_until(lambda: queue.summary().waiting + queue.summary().running == 0)
                children = children_of(worker.pid)
                assert len(children) == slots
                supervisor = pss_bytes(worker.pid)
                child = max(sum(map(pss_bytes, family_of(child))) for child in children)
        for name, size, bar in (("supervisor", supervisor, 40), ("each idle child", child, 15)):
            self.figures.append(
                Figure(
                    name=f"memory of {name}, MB",
                    value=size / MEBIBYTE,
                    bar=bar,
                    at_most=True,
                    ours=f"{size / MEBIBYTE:.1f} MB",
                )
            )

    def endless(self) -> None:
        """Measure the memory growth of a worker with no-op documents, after the first tenth."""
        file = self._file()
        total, at_once = self._endless, self._endless // 100
        sizes = []
        with Queue(file, completed_kept_s=0) as queue, worker_process(file, NOTHING, 2) as worker:
            for _ in range(0, total, at_once):
                fill_more(queue, at_once)
                wait_until(lambda: queue.summary().waiting < at_once // 2)
                sizes.append(pss_bytes(worker.pid))
                queue.prune()
            wait_until(lambda: queue.summary().waiting + queue.summary().running == 0)
            sizes.append(pss_bytes(worker.pid))
        growth = max(sizes[10:]) - max(sizes[:10])
        self.figures.append(
            Figure(
                name=f"{total:,} no-op documents: growth after the first tenth, MB",
                value=growth / MEBIBYTE,
                bar=5.0,
                at_most=True,
                ours=f"{sizes[-1] / MEBIBYTE:.1f} MB",
                theirs=f"{max(sizes[:10]) / MEBIBYTE:.1f} MB",
            )
        )


class worker_process:  # noqa: N801 - read as a function
    """Run a worker in a separate process until the end of the block."""

    def __init__(self, file: Path, handler: str, slots: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(file), handler, str(slots)], cwd=ROOT
        )

    def __enter__(self) -> "subprocess.Popen[bytes]":
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def fill_more(queue: Queue, documents: int) -> None:
    for begin in range(0, documents, 1_000):
        n = min(1_000, documents - begin)
        queue.submit_many(
            Submission(customer=f"customer-{i % CUSTOMERS}", payload=PAYLOAD) for i in range(n)
        )


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def family_of(pid: int) -> list[int]:
    """Return the pids of a process and its descendants: a slot is a reaper with the handler's
    process."""
    return [pid, *(below for child in children_of(pid) for below in family_of(child))]


def processor_s(pid: int) -> float:
    """Return the CPU time of a process and its descendants."""
    ticks = 0
    for one in family_of(pid):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    raise ValueError(f"the kernel does not tell the Pss of process {pid}")


def percentile(ordered: list[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, for a first look")
    parser.add_argument("--json", action="store_true", help="a JSON line for each row")
    parser.add_argument("--only", default="", help="only measurements whose name contains this")
    parser.add_argument(
        "--folder", type=Path, default=Path("build"), help="where to make the files"
    )
    parser.add_argument(
        "--peers", default="build/peers/bin/python", help="the Python that has the peers"
    )
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        bench = Bench(Path(folder), str(Path(options.peers).absolute()), quick=options.quick)

        def drain_threads() -> None:
            bench.drain_peers(bench.drain("threads", threads=True, bar=0.3))

        steps: dict[str, Callable[[], object]] = {
            "threads": drain_threads,
            "processes": lambda: bench.drain("processes", threads=False, bar=0.1, least=2_000),
            "latency": bench.latency,
            "waking": bench.waking,
            "busy": bench.busy,
            "memory": bench.memory,
            "endless": bench.endless,
        }
        for name, step in steps.items():
            if options.only in name:
                print(f"measuring: {name}", file=sys.stderr)
                step()
    return report(f"SQLite {apsw.sqlite_lib_version()}", bench.figures, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
