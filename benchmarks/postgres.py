"""fairturn on PostgreSQL beside other queues on PostgreSQL: `make bench-postgres`.

Everything is measured in one run, against one server with fsync on, in rounds: each contestant has
its turn in each round, in a new database and in processes of its own. Ratios are to the bare queue
of the same round (postgres_own.py). The peers (postgres_peers.py) have an environment of their own.
The run prints the rows that miss their bar and then exits non-zero.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import psycopg

from benchmarks import store as in_batches
from benchmarks.arena import OURS, Arena, OutOfContest, Process
from benchmarks.distance import further_away, round_trip_ms
from benchmarks.figures import Figure, in_turns
from benchmarks.standings import Section, Standing, report
from fairturn import Queue
from tests.servers.postgres import Server, started

# The package that shows whether a peer is installed.
PACKAGES = {
    "pgmq": "pgmq",
    "pgmq-round-robin": "pgmq",
    "pgqueuer": "pgqueuer",
    "chancy": "chancy",
    "oban": "oban",
    "saq": "saq",
    "procrastinate": "procrastinate",
}
# Slow contestants get fewer documents, by this factor, to keep the run short. pgmq's round robin
# gets all, because the rows that it reads per claim grow with the number waiting.
SLOW = {"oban": 4, "chancy": 4, "saq": 20, "procrastinate": 20}
# Drains per round of fast contestants, in turns: half a second alone varies too much.
DRAINS = 3
TAKE_LONG = {*SLOW, "pgmq-round-robin"}
# Documents per turn. Each contestant has several short turns, so that a change in the speed of the
# machine affects all of them.
ONES_A_TURN = 100
MANY_A_TURN = 10_000
CLAIMERS = 32
ADDED_US = 2_000


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the measurements. The bars are for the full sizes."""

    rounds: int
    documents: int
    ones: int
    looks: int
    waiting: int
    customers: int
    claiming_s: float


FULL = Sizes(
    rounds=3,
    documents=20_000,
    ones=2_000,
    looks=200,
    waiting=1_000_000,
    customers=100_000,
    claiming_s=10,
)
QUICK = Sizes(
    rounds=1,
    documents=5_000,
    ones=100,
    looks=50,
    waiting=50_000,
    customers=10_000,
    claiming_s=3,
)

Values = dict[str, list[float]]


class Bench:
    """The measurements; each yields one or more sections of the table."""

    def __init__(self, server: Server, arena: Arena, sizes: Sizes) -> None:
        self._server = server
        self._arena = arena
        self._sizes = sizes
        self.peers_version, self._out = arena.absent(PACKAGES)
        self.sections: list[Section] = []

    def _documents(self, name: str) -> int:
        return self._sizes.documents // SLOW.get(name, 1)

    def _rounds(
        self, names: tuple[str, ...], turn: Callable[[str, str], None], turns: int = 1
    ) -> Iterator[None]:
        """Give each contestant its turns in each round. A contestant that fails is excluded, with
        the reason in the table."""
        for _ in range(self._sizes.rounds):
            for n in range(turns):
                for name in (*names, *PACKAGES):
                    if name in self._out or (n and name in TAKE_LONG):
                        continue
                    try:
                        with self._arena.database() as url:
                            turn(name, url)
                    except OutOfContest as error:
                        self._leave_out(name, error)
            yield

    def _add(
        self,
        title: str,
        values: Values,
        figures: list[Figure],
        *,
        yardstick: str = "",
        unit: str = "/s",
        pooled: dict[str, float] | None = None,
    ) -> None:
        standings = [
            Standing(
                name=name,
                values=values[name],
                unit=unit,
                ratios=[
                    value / bare
                    for value, bare in zip(values[name], values[yardstick], strict=False)
                ]
                if yardstick
                else [],
                pooled=(pooled or {}).get(name),
                note=self._out.get(name, ""),
            )
            for name in (*(n for n in values if n not in PACKAGES), *PACKAGES)
        ]
        rest = sorted(
            (s for s in standings if s.values), key=lambda s: s.median, reverse=unit == "/s"
        )
        silent = [s for s in standings if not s.values]
        self.sections.append(Section(title=title, standings=[*rest, *silent], figures=figures))

    # ── Draining ─────────────────────────────────────────────────────────────────────────────────

    def drain(self) -> None:
        one: Values = defaultdict(list)
        two: Values = defaultdict(list)
        now_one: Values = defaultdict(list)  # in this round
        now_two: Values = defaultdict(list)

        def turn(name: str, url: str) -> None:
            now_one[name].append(self._drained(name, url, workers=1))
            with self._arena.database() as other:
                now_two[name].append(self._drained(name, other, workers=2))

        for _ in self._rounds(("bare", "fairturn"), turn, DRAINS):
            for values, now in ((one, now_one), (two, now_two)):
                for name, rates in now.items():
                    values[name].append(statistics.median(rates))
                now.clear()
        best = best_peer(one)
        ours = statistics.median(one["fairturn"])
        self._add(
            "drain, one worker, documents",
            one,
            [
                Figure(
                    name="fairturn of the bare loop",
                    value=ratio(one, "bare"),
                    bar=0.5,
                    ours=f"{ours:,.0f}/s",
                ),
                before(one, best, f"{best}, the best peer", bar=1.0),
            ],
            yardstick="bare",
        )
        best = best_peer(two)
        ours_two, lead = statistics.median(two["fairturn"]), ratio(two, best)
        gain = ours_two / ours
        figures = [
            Figure(
                name=f"1.3 times one worker ({gain:.2f} times), or first of all (before {best}: "
                f"{lead:.2f})",
                value=max(gain / 1.3, lead),
                bar=1.0,
                ours=f"{ours_two:,.0f}/s",
            )
        ]
        if two["pgmq-round-robin"]:
            figures.append(before(two, "pgmq-round-robin", "pgmq's round robin", bar=5.0))
        self._add("drain, two workers, documents", two, figures, yardstick="bare")

    def _drained(self, name: str, url: str, *, workers: int) -> float:
        documents = self._documents(name)
        self._arena.fill(name, url, many=documents)
        return documents / self._arena.drain_s(name, url, workers=workers, documents=documents)

    # ── Submitting ───────────────────────────────────────────────────────────────────────────────

    def submit(self) -> None:
        ones: Values = defaultdict(list)
        many: Values = defaultdict(list)
        every = ("bare", "bare-copy", "fairturn", *PACKAGES)
        for _ in range(self._sizes.rounds):
            with ExitStack() as stack:
                taking_part = {
                    name: process
                    for name in every
                    if name not in self._out and (process := self._submitter(stack, name))
                }
                n = {name: self._sizes.ones for name in every if name != "bare-copy"}
                self._in_turns(taking_part, "one", n, ONES_A_TURN, ones)
                n = {name: self._documents(name) for name in every}
                self._in_turns(taking_part, "many", n, MANY_A_TURN, many)
        best = best_peer(ones)
        ours = statistics.median(ones["fairturn"])
        self._add(
            "submit one at a time, documents",
            ones,
            [
                Figure(
                    name="fairturn of the bare insert",
                    value=ratio(ones, "bare"),
                    bar=0.6,
                    ours=f"{ours:,.0f}/s",
                ),
                before(ones, best, f"{best}, the best peer", bar=1.0),
            ],
            yardstick="bare",
        )
        best = best_peer(many)
        self._add(
            "submit in bulk, by 1,000, documents",
            many,
            [before(many, best, f"{best}, the best peer", bar=1.5)],
            yardstick="bare",
        )

    def _submitter(self, stack: ExitStack, name: str) -> Process | None:
        """Return a process with a database of its own; None if the contestant cannot take part."""
        url = stack.enter_context(self._arena.database())
        process = self._arena.submitter(name, url)
        try:
            stack.enter_context(process)
        except OutOfContest as error:
            self._leave_out(name, error)
            return None
        return process

    def _in_turns(
        self, taking_part: dict[str, Process], way: str, n: dict[str, int], size: int, rates: Values
    ) -> None:
        """Give all contestants short turns, in a new order each time."""
        self._arena.checkpoint()
        took: dict[str, float] = defaultdict(float)
        for turn, first in enumerate(range(0, max(n.values()), size)):
            names = [name for name in taking_part if n.get(name, 0) > first]
            for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
                try:
                    took[name] += taking_part[name].turn_s(way, first, min(size, n[name] - first))
                except OutOfContest as error:
                    self._leave_out(name, error)
                    del taking_part[name]
        for name in taking_part:
            if took[name]:
                rates[name].append(n[name] / took[name])

    def _leave_out(self, name: str, error: OutOfContest) -> None:
        """Exclude a contestant that failed, with the reason in the table; fairturn must not
        fail."""
        if name in OURS:
            raise error
        print(error, file=sys.stderr)
        self._out[name] = str(error)

    # ── From submission to start ─────────────────────────────────────────────────────────────────

    def idle(self) -> None:
        found: dict[str, list[list[float]]] = defaultdict(list)

        def turn(name: str, url: str) -> None:
            self._arena.fill(name, url)
            looks = self._arena.looks_s(name, url, self._sizes.looks)
            found[name].append([1e3 * look for look in looks])

        for _ in self._rounds(("fairturn",), turn):
            pass
        for percent in (50, 99):
            values: Values = defaultdict(list)
            for name, rounds in found.items():
                values[name] = [percentile(looks, percent) for looks in rounds]
            pooled = {
                name: percentile([*chain.from_iterable(rounds)], percent)
                for name, rounds in found.items()
            }
            best = min((name for name in pooled if name in PACKAGES), key=lambda n: pooled[n])
            figure = against(
                f"fairturn against {best}, the best peer",
                pooled["fairturn"],
                pooled[best],
                bar=1.0,
                at_most=True,
            )
            title = f"from submission to start, idle, p{percent}"
            self._add(title, values, [figure], unit="ms", pooled=pooled)

    # ── Large queues: fairturn against itself ────────────────────────────────────────────────────

    def waiting(self) -> None:
        self._large(
            f"drain with {self._sizes.waiting:,} waiting",
            customers=100,
            documents=self._sizes.waiting,
        )

    def customers(self) -> None:
        customers = self._sizes.customers
        self._large(
            f"drain with {customers:,} customers", customers=customers, documents=5 * customers
        )

    def _large(self, title: str, *, customers: int, documents: int) -> None:
        batches, rounds = 10, 10 * self._sizes.rounds
        n = batches * in_batches.BATCH
        with ExitStack() as stack:
            small, large = (stack.enter_context(self._queue()) for _ in range(2))
            in_batches.fill(small[0], customers=100, documents=n * (rounds + 10))
            in_batches.fill(large[0], customers=customers, documents=documents)
            for queue, url in (small, large):
                settle(url)
                in_batches.drain(queue, batches)
            small_s, large_s = in_turns(
                rounds,
                lambda: in_batches.drain(small[0], batches),
                lambda: in_batches.drain(large[0], batches),
            )
        self._add_own(
            title,
            {"large": [n / large_s], "100 customers, few waiting": [n / small_s]},
            [against("the large against the small", n / large_s, n / small_s, bar=0.8)],
        )

    @contextmanager
    def _queue(self) -> Iterator[tuple[Queue, str]]:
        with self._arena.database() as url, Queue(url) as queue:
            yield queue, url

    def _add_own(self, title: str, values: Values, figures: list[Figure], unit: str = "/s") -> None:
        standings = [Standing(name=name, values=v, unit=unit) for name, v in values.items()]
        self.sections.append(Section(title=title, standings=standings, figures=figures))

    # ── Claims of one, from far away ─────────────────────────────────────────────────────────────

    def claims(self) -> None:
        seconds = self._sizes.claiming_s
        with ExitStack() as stack:
            queue, url = stack.enter_context(self._queue())
            in_batches.fill(queue, customers=100, documents=int(2_000 * seconds))
            settle(url)
            far = stack.enter_context(further_away(url, ADDED_US))
            added_ms = round_trip_ms(far) - round_trip_ms(url)
            command = [sys.executable, "-m", "benchmarks.claimers", far, str(seconds)]
            claimers = [Process(command, "fairturn") for _ in range(CLAIMERS)]
            for go in [stack.enter_context(claimer) for claimer in claimers]:
                go()
            took = [1e3 * s for claimer in claimers for s in json.loads(claimer.answer())]
        rate = len(took) / seconds
        title = f"claims of one, {CLAIMERS} claimers, {added_ms:.1f} ms added to a round trip"
        self._add_own(
            title,
            {"claims": [rate]},
            [
                Figure(name="claims a second", value=rate, bar=200, ours=f"{rate:,.0f}/s"),
                Figure(name="p50, ms", value=percentile(took, 50), bar=None, ours=""),
                Figure(name="p99, ms", value=percentile(took, 99), bar=None, ours=""),
            ],
        )


def against(name: str, ours: float, theirs: float, *, bar: float, at_most: bool = False) -> Figure:
    return Figure(
        name=name,
        value=ours / theirs,
        bar=bar,
        at_most=at_most,
        ours=f"{ours:,.2f}",
        theirs=f"{theirs:,.2f}",
    )


def best_peer(values: Values) -> str:
    """Return the peer with the best median."""
    medians = {name: statistics.median(values[name]) for name in PACKAGES if values[name]}
    if not medians:
        raise OutOfContest("no peer has a figure")
    return max(medians, key=lambda name: medians[name])


def ratio(values: Values, yardstick: str) -> float:
    """Return the median ratio of fairturn to a contestant in the same round."""
    pairs = zip(values["fairturn"], values[yardstick], strict=False)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def before(values: Values, peer: str, what: str, *, bar: float) -> Figure:
    """Return fairturn's values beside those of a peer, round by round."""
    ours, theirs = (statistics.median(values[name]) for name in ("fairturn", peer))
    return Figure(
        name=f"fairturn against {what}",
        value=ratio(values, peer),
        bar=bar,
        ours=f"{ours:,.0f}/s",
        theirs=f"{theirs:,.0f}/s",
    )


def percentile(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def settle(url: str) -> None:
    """Vacuum as autovacuum would on a queue in use, and flush what others wrote."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM (ANALYZE)")
        connection.execute("CHECKPOINT")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, for a first look")
    parser.add_argument("--json", action="store_true", help="a JSON line for each row")
    parser.add_argument("--only", default="", help="only measurements whose name contains this")
    parser.add_argument(
        "--peers", default="build/postgres-peers/bin/python", help="the Python that has the peers"
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=100,
        help="how much pgmq, pgqueuer, chancy and oban take; the bare loop takes 100",
    )
    options = parser.parse_args()
    sizes = QUICK if options.quick else FULL
    peers = str(Path(options.peers).absolute())
    with started(fsync=True) as server, tempfile.TemporaryDirectory() as folder:
        bench = Bench(server, Arena(server, Path(folder), peers, at_once=options.at_once), sizes)
        steps: dict[str, Callable[[], None]] = {
            "drain": bench.drain,
            "submit": bench.submit,
            "idle": bench.idle,
            "waiting": bench.waiting,
            "customers": bench.customers,
            "claims": bench.claims,
        }
        for name, step in steps.items():
            if options.only in name:
                print(f"measuring: {name}", file=sys.stderr)
                step()
        ((version,),) = psycopg.connect(server.url()).execute("SHOW server_version").fetchall()
    title = (
        f"PostgreSQL {version}, fsync on; Python {platform.python_version()}, of the peers "
        f"{bench.peers_version}, {options.at_once} at once; rounds in turns: {sizes.rounds}"
    )
    return report(title, bench.sections, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
