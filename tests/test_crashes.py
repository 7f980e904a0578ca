"""A process that is killed at any crash point loses nothing that it acknowledged.

A child executes a script on a database and is killed by SIGKILL at one point of one step. The
database must then contain exactly the steps that were committed: a point after the commit includes
its step, a point before does not. The script on a memory store is the reference. Then this process
continues the work to the end.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import apsw
import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.errors import StoreError
from fairturn.model import (
    Advanced,
    AttemptRecord,
    Claim,
    Claimed,
    Completed,
    ContentRef,
    CustomerSettings,
    Failed,
    Kind,
    KindSettings,
    NewDocument,
    OutageReport,
    Outcome,
    Receipt,
    Released,
    ServiceOutage,
    Settings,
    Snoozed,
    State,
)
from fairturn.scheduling.flows import Mode
from fairturn.stores import crash
from fairturn.stores.conformance import StoreDump, snapshot
from fairturn.stores.conformance.steps import assert_numbers_are_exact
from fairturn.stores.contract import QueueStore as Store
from fairturn.stores.memory import MemoryStore
from fairturn.stores.sqlite import SqliteStore
from tests.forks import Forks, forks_of
from tests.servers.places import Places, opened
from tests.servers.queues import Databases

START = 1_700_000_000 * SECOND_US
LEASE_S = 30
LEASE_US = LEASE_S * SECOND_US
KEY = 0xC0FFEE
SETTINGS = Settings(completed_kept_s=3_600)

# Points that no store reaches by itself; the tests of contents, of the queue, of backups and of
# copies cover them.
NOT_OF_A_STORE = {
    "content-before-write",
    "content-before-rename",
    "content-after-rename",
    "prune-after-delete",
    "backup-before-rename",
    "backup-after-rename",
    "restore-before-rename",
    "restore-after-rename",
    "copy-before-commit",
    "copy-after-commit",
}

# ── The script ───────────────────────────────────────────────────────────────────────────────────


class Script:
    """A series of calls on one store; each call is one transaction."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        self.store = store
        self.clock = clock
        self.receipts: list[Receipt] = []
        self.claims: list[Claim] = []

    def submit_one(self) -> list[Receipt]:
        return self._submit(new("a", "first"))

    def submit_many(self) -> list[Receipt]:
        later = self.clock.now() + 60 * SECOND_US
        documents = [new("abc"[n % 3], f"many {n}") for n in range(20)]
        content = new("b", "content")._replace(body=None, content_name="bb/document")
        return self._submit(*documents, content, new("c", "later")._replace(due_at=later))

    def submit_again(self) -> list[Receipt]:
        return self._submit(new("a", "first"), new("d", "another"))

    def _submit(self, *documents: NewDocument) -> list[Receipt]:
        receipts = self.store.submit(documents)
        self.receipts += receipts
        return receipts

    def claim(self) -> None:
        self._claim(8)

    def renew(self) -> None:
        self.clock.advance(20)
        fences = [claim.fence for claim in self.claims[:6]]
        assert self.store.renew(fences, lease_us=LEASE_US) == ([], [])

    def finish(self) -> None:
        first, second, third, fourth = (claim.fence for claim in self.claims[:4])
        outcomes: list[Outcome] = [
            Completed(first, '"done"', ContentRef("aa/result", 3, b"\x01" * 32)),
            Failed(second, "never again"),
            Failed(third, "busy", 5 * SECOND_US),
            Released(fourth),
        ]
        assert self.store.finish(outcomes) == []

    def claim_with_outcomes(self) -> None:
        self._claim(3, Completed(self.claims[4].fence), Failed(self.claims[5].fence, "busy", 0))

    def cancel(self) -> None:
        running = self.claims[-1].document.id
        waiting = self.receipts[15].id
        assert self.store.cancel([running, waiting]) == [State.RUNNING, State.CANCELLED]

    def retry(self) -> None:
        assert self.store.retry([self.claims[1].document.id]) == [State.DEAD]

    def adjust(self) -> None:
        self.store.adjust("a", CustomerSettings(weight=2, limit=4))

    def configure(self) -> None:
        self.store.configure(Settings(mode=Mode.EQUAL, completed_kept_s=3_600))

    def claim_what_leases_left(self) -> None:
        self.clock.advance(LEASE_S)
        self._claim(6)

    def configure_kind(self) -> None:
        assert self.store.configure_kind("ocr", KindSettings(limit=4, expires_in_s=600))

    def renew_with_a_checkpoint(self) -> None:
        fence = self.claims[-6].fence
        renewed = self.store.renew([fence], lease_us=LEASE_US, checkpoints={fence: '"page 7"'})
        assert renewed == ([], [])

    def finish_steps(self) -> None:
        fences = [claim.fence for claim in self.claims[-6:]]
        outcomes: list[Outcome] = [
            Released(fences[0]),
            Advanced(fences[1], "ocr", '"value"', ContentRef("cc/step", 4, b"\x02" * 32)),
            Snoozed(fences[2], 5 * SECOND_US),
            OutageReport(fences[3], "down"),
            OutageReport(fences[4], "down"),
            Failed(fences[5], "busy", 5 * SECOND_US, "Traceback"),
        ]
        assert self.store.finish(outcomes) == []
        assert [outage.service for outage in self.store.outages()] == ["kind:default"]

    def claim_the_next_step(self) -> None:
        self._claim(1)
        assert self.claims[-1].previous == '"value"'

    def claim_a_probe(self) -> None:
        self.clock.advance(5)
        self._claim(1)

    def resume(self) -> None:
        assert self.store.resume("kind:default")

    def submit_briefly(self) -> list[Receipt]:
        soon = self.clock.now() + 2 * SECOND_US
        ocr = new("e", "by the rule")._replace(kind="ocr")
        brief = (new("e", f"{n}")._replace(expires_at=soon + n) for n in (1, 2, 3))
        return self._submit(*brief, ocr)

    def expire(self) -> None:
        self.clock.advance(3)
        assert self.store.expire(2) == 2

    def claim_after_expiry(self) -> None:
        self._claim(1)
        assert self.store.summary().expired == 3

    def retry_with_an_expiry(self) -> None:
        ids = [receipt.id for receipt in self.receipts[-4:]]
        states = self.store.retry(ids, expires_at=self.clock.now() + 60 * SECOND_US)
        assert states == [State.EXPIRED] * 3 + [State.RUNNING]

    def prune(self) -> None:
        self.clock.advance(3_601)
        assert self.store.prune() == ["aa/result"]

    def purge(self) -> None:
        assert self.store.purge("b") == ["bb/document"]

    def _claim(self, n: int, *outcomes: Completed | Failed) -> None:
        claimed = self.store.claim(n, worker="w", lease_us=LEASE_US, outcomes=outcomes)
        assert claimed.lost == []
        assert len(claimed.claims) == n
        self.claims += claimed.claims


def new(customer: str, key: str) -> NewDocument:
    return NewDocument(customer, f'"{key}"', key=key, digest=key.encode())


# Each step with the points of its transaction. Opening a new file has two: the schema, the
# settings.
STEPS: tuple[tuple[str, Callable[[Script], Any]], ...] = (
    ("submit", Script.submit_one),
    ("submit", Script.submit_many),
    ("claim", Script.claim),
    ("renew", Script.renew),
    ("finish", Script.finish),
    ("claim", Script.claim_with_outcomes),
    ("cancel", Script.cancel),
    ("retry", Script.retry),
    ("configure", Script.adjust),
    ("configure", Script.configure),
    ("claim", Script.claim_what_leases_left),
    ("configure", Script.configure_kind),
    ("renew", Script.renew_with_a_checkpoint),
    ("finish", Script.finish_steps),
    ("claim", Script.claim_the_next_step),
    ("claim", Script.claim_a_probe),
    ("configure", Script.resume),
    ("submit", Script.submit_briefly),
    ("expire", Script.expire),
    ("claim", Script.claim_after_expiry),
    ("retry", Script.retry_with_an_expiry),
    ("prune", Script.prune),
    ("submit", Script.submit_again),
    ("prune", Script.purge),
)
OPENING = ("migrate", "configure")


class Crash(NamedTuple):
    """A point, which occurrence of it, and what the script has done by then."""

    point: str
    times: int
    step: int  # -1: opening the file
    done: int  # steps in the file

    @property
    def name(self) -> str:
        step = "open" if self.step < 0 else STEPS[self.step][1].__name__
        return f"{self.point}-in-{step}"


def crashes() -> list[Crash]:
    """Return every point of every step."""
    found = []
    reached: dict[str, int] = {}
    stems = [(-1, stem) for stem in OPENING] + [(n, stem) for n, (stem, _) in enumerate(STEPS)]
    for step, stem in stems:
        reached[stem] = reached.get(stem, 0) + 1
        found.append(Crash(f"{stem}-before-commit", reached[stem], step, max(0, step)))
        found.append(Crash(f"{stem}-after-commit", reached[stem], step, step + 1))
    return found


@pytest.fixture(params=["sqlite", "postgres"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Places]:
    with Databases() as databases:
        yield Places(request.param, tmp_path, databases)


def test_every_crash_point_is_covered() -> None:
    assert {each.point for each in crashes()} | NOT_OF_A_STORE == set(crash.POINTS)


# ── The child ────────────────────────────────────────────────────────────────────────────────────


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def work(place: str) -> None:
    """Run the script in a child, which prints each step when it begins."""
    clock = ManualClock(START)
    say("begin -1")
    store = opened(place, settings=SETTINGS, clock=clock, key=KEY)
    script = Script(store, clock)
    for number, (_, step) in enumerate(STEPS):
        say(f"begin {number}")
        step(script)
    say("end")


def submit_in_threads(place: str) -> None:
    """Submit one document after the other in many threads, and print what was acknowledged."""
    store = opened(place, clock=ManualClock(START), key=KEY)
    saying = threading.Lock()

    def submit(thread: int) -> None:
        for n in range(20):
            (receipt,) = store.submit([new("abc"[n % 3], f"{thread}-{n}")])
            with saying:
                say(f"{receipt.id} {thread}-{n}")

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with forks_of("tests.test_crashes") as forks:
        yield forks


def run_child(forks: Forks, what: str, place: str, crash_at: str) -> tuple[int, list[str]]:
    """Return the exit code and the output of the child."""
    ended = forks.run(what, place, FAIRTURN_CRASH_AT=crash_at)
    assert ended.stderr == ""
    return ended.code, ended.stdout.splitlines()


# ── The promise ──────────────────────────────────────────────────────────────────────────────────


def expected(done: int) -> Script:
    """Run this many steps of the script on a memory store."""
    clock = ManualClock(START)
    script = Script(MemoryStore(settings=SETTINGS, clock=clock, key=KEY), clock)
    for _, step in STEPS[:done]:
        step(script)
    return script


class Observed(NamedTuple):
    """What a store shows, with what the documents have done."""

    dump: StoreDump
    attempts: list[list[AttemptRecord] | None]
    outages: list[ServiceOutage]
    kinds: list[Kind]

    @classmethod
    def of(cls, store: Store) -> "Observed":
        dump = snapshot(store)
        attempts = [store.attempts(s.document.id, values=True) for s in dump.documents]
        return cls(dump, attempts, store.outages(), store.kinds())


def go_on(store: Store, clock: ManualClock) -> None:
    """Let the leases of the dead process expire, and complete everything that can be completed."""
    clock.advance(LEASE_S)
    for _ in range(20):
        claims = store.claim(100, worker="another", lease_us=LEASE_US).claims
        assert store.finish([Completed(claim.fence, "1") for claim in claims]) == []
        clock.advance(10)


@pytest.mark.parametrize("crashed", crashes(), ids=lambda crashed: crashed.name)
def test_a_process_that_is_killed_loses_nothing_and_another_goes_on(
    places: Places, forks: Forks, crashed: Crash
) -> None:
    place = places.new()

    ended, said = run_child(forks, "work", place, f"{crashed.point}:{crashed.times}")

    assert ended == -signal.SIGKILL, f"the point was not reached; the child said {said}"
    assert said[-1] == f"begin {crashed.step}"
    script = expected(crashed.done)
    # The time of an interrupted step has passed for other processes too.
    moment = expected(max(0, crashed.step + 1)).clock
    script.clock.advance((moment.uptime().at - script.clock.uptime().at) / SECOND_US)
    store = opened(place, clock=script.clock)
    try:
        if crashed.step < 0:
            store.configure(SETTINGS)  # before or after the crash
        else:
            assert Observed.of(store) == Observed.of(script.store)
        submit_again_what_was_not_answered(store, script, crashed)
        go_on(store, script.clock)
        shown = Observed.of(store)
        assert_numbers_are_exact(store)
    finally:
        store.close()

    twin = expected(crashed.done)
    twin.clock.advance((moment.uptime().at - twin.clock.uptime().at) / SECOND_US)
    submit_again_what_was_not_answered(twin.store, twin, crashed)
    go_on(twin.store, twin.clock)
    if crashed.step >= 0:
        # A server never reuses the numbers of a transaction, even one that was rolled back: only
        # the order of later documents is the same.
        drawn = places.kind == "postgres" and crashed.point == "submit-before-commit"
        wanted = Observed.of(twin.store)
        if drawn:
            shown, wanted = (each._replace(dump=ranked(each.dump)) for each in (shown, wanted))
        assert shown == wanted
    ended_states = {State.COMPLETED, State.CANCELLED, State.DEAD, State.EXPIRED}
    assert {stored.document.state for stored in shown.dump.documents} <= ended_states
    if places.kind == "sqlite":
        assert_whole(Path(place))


def ranked(shown: StoreDump) -> StoreDump:
    """Replace the numbers of documents by their ranks."""
    ids = {stored.document.id: f"{n}" for n, stored in enumerate(shown.documents)}
    return shown._replace(
        documents=[
            stored._replace(
                document=stored.document._replace(id=ids[stored.document.id], order=None)
            )
            for stored in shown.documents
        ]
    )


def submit_again_what_was_not_answered(store: Store, script: Script, crashed: Crash) -> None:
    """A submitter without a reply submits again, and finds documents that were stored."""
    if crashed.step < 0 or STEPS[crashed.step][0] != "submit":
        return
    script.store = store
    receipts = STEPS[crashed.step][1](script)
    stored = crashed.done > crashed.step
    fresh = [receipt for receipt in receipts if not receipt.replayed]
    assert bool(fresh) != stored


def test_the_script_reaches_its_end_when_nobody_is_killed(places: Places, forks: Forks) -> None:
    place = places.new()

    ended, said = run_child(forks, "work", place, "")

    script = expected(len(STEPS))
    store = opened(place, clock=script.clock)
    assert (ended, said[-1]) == (0, "end")
    assert Observed.of(store) == Observed.of(script.store)
    store.close()


@pytest.mark.parametrize("times", [1, 2, 5, 9])
@pytest.mark.parametrize("point", ["submit-before-commit", "submit-after-commit"])
def test_of_threads_that_share_a_commit_each_finds_what_was_acknowledged(
    places: Places, forks: Forks, point: str, times: int
) -> None:
    place = places.new()

    ended, said = run_child(forks, "submit_in_threads", place, f"{point}:{times}")

    assert ended == -signal.SIGKILL
    acknowledged = dict(line.split() for line in said)
    store = opened(place, clock=ManualClock(START))
    shown = snapshot(store)
    found = {stored.document.id: str(stored.body).strip('"') for stored in shown.documents}
    assert acknowledged.items() <= found.items()
    assert len(set(found.values())) == len(found)
    for name in "abc":
        counts = [s.document.count for s in shown.documents if s.document.customer == name]
        assert counts == list(range(-len(counts) + 1, 1))
    for stored in shown.documents:
        id = stored.document.id
        (receipt,) = store.submit([new(stored.document.customer, found[id])])
        assert (receipt.id, receipt.replayed) == (id, True)
    assert_numbers_are_exact(store)
    store.close()
    if places.kind == "sqlite":
        assert_whole(Path(place))


# ── Statements and commits that fail ─────────────────────────────────────────────────────────────


class Failing:
    """A store in which every call fails at its first statement, then at its second, and so on, or
    at its commit, and then succeeds. After each failure the state must be as before."""

    def __init__(
        self, where: str, file: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.failures = 0
        self._where = where
        self._fails_to_commit = False
        self._fails_after: int | None = None  # a number of statements
        with monkeypatch.context() as patch:
            patch.setattr(apsw, "connection_hooks", [self._watch])
            self.store = SqliteStore(file, settings=SETTINGS, clock=clock, key=KEY)

    def _watch(self, connection: apsw.Connection) -> None:
        connection.set_commit_hook(lambda: self._fails_to_commit)
        connection.exec_trace = self._may_execute

    def _may_execute(self, cursor: apsw.Cursor, statement: str, bound: Any) -> bool:
        if self._fails_after is None:
            return True
        self._fails_after -= 1
        return self._fails_after != -1

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *given, **named: self._call(getattr(self.store, name), *given, **named)

    def _call(self, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        before = Observed.of(self.store)
        failures = 0
        while True:
            self._fails_to_commit = self._where == "commit" and failures == 0
            self._fails_after = failures if self._where == "statement" else None
            try:
                return call(*given, **named)
            except StoreError:
                failures += 1
                assert failures < 500, "the call fails also when nothing fails any more"
            finally:
                self._fails_to_commit = False
                self._fails_after = None
            self.failures += 1
            assert Observed.of(self.store) == before


@pytest.mark.parametrize("where", ["statement", "commit"])
def test_a_call_that_fails_changes_nothing_and_can_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    clock = ManualClock(START)
    failing = Failing(where, tmp_path / "queue.db", clock, monkeypatch)
    script = Script(cast(Store, failing), clock)

    for done, (_, step) in enumerate(STEPS, start=1):
        step(script)
        assert Observed.of(failing.store) == Observed.of(expected(done).store), step.__name__

    assert failing.failures >= len(STEPS)
    twin = expected(len(STEPS))
    go_on(failing.store, clock)
    go_on(twin.store, twin.clock)
    assert snapshot(failing.store) == snapshot(twin.store)
    failing.store.close()
    assert_whole(tmp_path / "queue.db")


@pytest.mark.parametrize("where", ["statement", "commit"])
@pytest.mark.parametrize("mode", list(Mode))
def test_claims_that_fail_do_not_change_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode, where: str
) -> None:
    clock = ManualClock(START)
    failing = Failing(where, tmp_path / "queue.db", clock, monkeypatch)
    stores: list[Store] = [failing.store, MemoryStore(settings=SETTINGS, clock=clock, key=KEY)]
    for store in stores:
        store.configure(Settings(mode=mode, patience_s=3))
        store.adjust("a", CustomerSettings(weight=3))
        store.adjust("b", CustomerSettings(limit=2))

    for n, names in enumerate(["aaaabbbbcc", "d", "aab", "", "cde", "", "a", ""]):
        answers: list[Claimed] = []
        for store in stores:
            receipts = store.submit([NewDocument(name, "1") for name in names])
            store.cancel([receipt.id for receipt in receipts[1:2]])
            claiming = cast(Store, failing) if store is failing.store else store
            answers.append(claiming.claim(3, worker="w", lease_us=LEASE_US))
            ended = answers[-1].claims[: n % 3]
            assert store.finish([Completed(claim.fence) for claim in ended]) == []
        assert answers[0] == answers[1]
        clock.advance(7)

    assert snapshot(stores[0]) == snapshot(stores[1])
    failing.store.close()


def test_a_crash_point_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", "import fairturn.stores.crash"],
        env={**os.environ, "FAIRTURN_CRASH_AT": "somewhere"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert child.returncode == 1
    assert "FAIRTURN_CRASH_AT is 'somewhere'; it must be one of: " in child.stderr


def assert_whole(file: Path) -> None:
    connection = apsw.Connection(str(file))
    assert connection.pragma("integrity_check") == "ok"
    connection.close()
