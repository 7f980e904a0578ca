"""`fairturn doctor --thorough` finds and repairs each planted damage, and finds nothing in a sound
queue."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import apsw
import psycopg
import pytest

from fairturn.cli.recount import Recountable
from fairturn.clock import SECOND_US, ManualClock
from fairturn.maintenance import sqlite_file as sqlite
from fairturn.model import (
    Advanced,
    Completed,
    CustomerSettings,
    Failed,
    Filter,
    KindSettings,
    NewDocument,
    OutageReport,
    Outcome,
    Released,
    Settings,
    Snoozed,
    State,
    Stopped,
)
from fairturn.scheduling.flows import Costs, Mode
from fairturn.stores.conformance.steps import find_all, prune_all
from fairturn.stores.inspection import Damages, describe
from fairturn.stores.postgres import audit as postgres
from fairturn.stores.urls import is_address
from tests.commands import fairturn, lines_of
from tests.servers.places import AnyStore, opened
from tests.servers.queues import Databases

START = 1_700_000_000 * SECOND_US
LEASE_S = 30
LEASE_US = LEASE_S * SECOND_US


@pytest.fixture
def databases() -> Iterator[Databases]:
    """Emptied and reused: most cases take less time than creating a database."""
    with Databases(recycled=True) as made:
        yield made


@pytest.fixture(params=["sqlite", "postgres"])
def place(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    databases: Databases,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    for name in [name for name in os.environ if name.startswith("FAIRTURN_")]:
        monkeypatch.delenv(name)  # variables of the tests are not settings
    return databases.new() if request.param == "postgres" else str(tmp_path / "documents.db")


def examined(place: str) -> AbstractContextManager[Recountable]:
    if is_address(place):
        return postgres.examined(place)
    return sqlite.examined(Path(place))


def damages(place: str) -> list[str]:
    """Return the findings of the recount as text."""
    with examined(place) as queue:
        return [describe(damage) for damage in Damages(queue.recount(lambda *_: None)).shown]


def execute(place: str, statement: str) -> None:
    """Plant a damage."""
    if is_address(place):
        with psycopg.connect(place) as connection:
            connection.execute("SET search_path = fairturn")
            connection.execute("SELECT FROM queue FOR UPDATE")  # excludes claims
            assert connection.execute(statement).rowcount, "nothing was planted"
    else:
        with closing(apsw.Connection(place)) as file:
            file.set_busy_timeout(10_000)
            file.execute(statement).fetchall()
            assert file.changes(), "nothing was planted"


def doctor(place: str, *options: str) -> list[dict[str, Any]]:
    """Return the lines of the recount. Leases on a manual clock are wrong in other lines."""
    result = fairturn("doctor", "--thorough", "--json", "--database", place, *options)
    assert result.exit_code in (0, 1), result.output
    result.exit_code = 0
    return [line for line in lines_of(result) if line["check"] == "recount"]


# ── A queue that is whole ────────────────────────────────────────────────────────────────────────


def new(customer: str, **fields: Any) -> NewDocument:
    return NewDocument(customer, "1", **fields)


def traffic(store: AnyStore, clock: ManualClock) -> Iterator[str]:
    """Run every operation of the contract; yield the name of each after it was done."""

    store.configure_kind("ocr", KindSettings())
    for mode, costs in (
        (Mode.FAIR, Costs.EQUAL),
        (Mode.EQUAL, Costs.LEARNED),
        (Mode.LEVELS, Costs.KNOWN),
        (Mode.FAIR, Costs.LEARNED),
    ):
        store.configure(replace(store.settings(), mode=mode, costs=costs))
        yield f"mode {mode}"
        yield from documents_move(store, clock)
        yield from documents_are_left(store, clock)


def documents_move(store: AnyStore, clock: ManualClock) -> Iterator[str]:
    """Submit documents, and end attempts in every way."""
    store.adjust("ltd", CustomerSettings(limit=2))
    store.adjust("heavy", CustomerSettings(weight=3))
    yield "adjust"
    for customer in ("acme", "ltd", "heavy", "gone"):
        store.submit([new(customer, key=f"{n}{clock.now()}") for n in range(8)])
    brief = [new("acme", expires_at=clock.now() + s * SECOND_US) for s in (1, 5, 20, 900)]
    store.submit([*brief, new("ltd", kind="ocr"), new("acme", kind="ocr")])
    later = clock.now() + 40 * SECOND_US
    delayed = store.submit([new("acme", due_at=later), new("ltd", due_at=later)])
    yield "submit"
    claims = store.claim(12, worker="w", lease_us=LEASE_US).claims
    yield "claim"
    parent = claims[0].document
    store.submit([new(parent.customer, parent=parent.id) for _ in range(2)])
    fences = [claim.fence for claim in claims]
    store.renew(fences, lease_us=LEASE_US, checkpoints=dict.fromkeys(fences[:4], "1"))
    yield "checkpoint"
    outcomes: list[Outcome] = [
        Completed(fences[0], '"done"'),
        Failed(fences[1], "busy", 5 * SECOND_US),
        Failed(fences[2], "never again"),
        Released(fences[3]),
        Stopped(fences[4]),
        Completed(fences[5], real_cost=7_000_000),
        Advanced(fences[7], "ocr", "1"),
        Advanced(fences[8], "default"),
        Snoozed(fences[9], 5 * SECOND_US),
        OutageReport(fences[10], "down"),
    ]
    store.finish(outcomes)
    yield "finish"
    waiting = find_all(store, Filter(states=(State.WAITING,)))
    store.cancel([waiting[0].id, waiting[-1].id, delayed[0].id, fences[6].document])
    yield "cancel"
    clock.advance(2)
    store.expire(1)
    yield "expiry"
    expired = find_all(store, Filter(states=(State.EXPIRED,)))
    store.retry([each.id for each in expired], expires_at=clock.now() + SECOND_US)
    store.retry([fences[2].document])
    yield "retry"


def documents_are_left(store: AnyStore, clock: ManualClock) -> Iterator[str]:
    """Let leases expire, prune, and complete what is left."""

    def claim(n: int) -> list[Any]:
        return store.claim(n, worker="w", lease_us=LEASE_US).claims

    store.adjust("ltd", CustomerSettings(limit=1, paused=True))
    yield "pause"
    claims = claim(6)
    yield "claim"
    store.adjust("ltd", CustomerSettings())
    store.renew([claims[-1].fence], lease_us=3 * LEASE_US)
    yield "renew"
    clock.advance(LEASE_S + 1)
    claim(5)
    yield "expire"
    store.purge("gone")
    yield "purge"
    clock.advance(60)
    claim(2)
    yield "due"
    clock.advance(40 * 86_400)
    prune_all(store)
    yield "prune"
    left = claim(200)
    store.finish([Completed(c.fence) for c in left])
    yield "drained"
    for service in store.outages():
        store.resume(service.service)
    yield "resume"


def test_a_queue_in_use_has_no_damages_at_any_moment(place: str) -> None:
    clock = ManualClock(START)
    with closing(opened(place, clock=clock)) as store:
        for step, after in enumerate(traffic(store, clock)):
            assert damages(place) == [], f"step {step}, {after}"

    (line,) = doctor(place)
    assert line["state"] == "ok"


def test_a_recount_beside_processes_at_work_finds_nothing(place: str) -> None:
    with closing(opened(place)) as store, ThreadPoolExecutor(3) as pool:
        store.adjust("ltd", CustomerSettings(limit=2))
        stop = Event()
        done = [pool.submit(_work, place, stop, name) for name in ("acme", "ltd")]
        try:
            found = [damages(place) for _ in range(30)]
        finally:
            stop.set()
        rounds = [future.result(timeout=30) for future in done]

    assert [each for each in found if each] == []
    assert min(rounds) > 0


def _work(place: str, stop: Event, customer: str) -> int:
    """Submit, claim, finish, release, cancel and retry until stopped."""
    rounds = 0
    with closing(opened(place)) as store:
        while not stop.is_set():
            ids = [r.id for r in store.submit([new(customer) for _ in range(6)])]
            store.cancel(ids[:1])
            fences = [c.fence for c in store.claim(5, worker="w", lease_us=LEASE_US).claims]
            ends = (Released, Completed, lambda fence: Failed(fence, "never again"))
            store.finish([ends[n % 3](fence) for n, fence in enumerate(fences)])
            store.retry([fence.document for fence in fences])
            rounds += 1
    return rounds


# ── Damages ──────────────────────────────────────────────────────────────────────────────────────

BOTH, SQLITE, POSTGRES = "both", "sqlite", "postgres"
ACME = "(SELECT number FROM customers WHERE name = 'acme')"
LTD = "(SELECT number FROM customers WHERE name = 'ltd')"
OLD = "(SELECT number FROM customers WHERE name = 'old')"
FIRST = f"(SELECT min(number) FROM documents WHERE customer = {ACME} AND state = {{}})"


class Plant(NamedTuple):
    """A damage: the kind that must be found, and the statement that causes it."""

    kind: str
    where: str
    statement: str
    label: str = ""


PLANTS = (
    Plant("flow.folded", BOTH, f"UPDATE flows SET folded = folded + 2 WHERE customer = {ACME}"),
    Plant("flow.folded", BOTH, f"UPDATE flows SET folded = 0 WHERE customer = {ACME}", "none"),
    Plant("flow.folded", BOTH, f"DELETE FROM flows WHERE customer = {ACME}", "no flow"),
    Plant(
        "flow.folded",
        BOTH,
        f"DELETE FROM documents WHERE number = {FIRST.format(1)}",
        "a document is gone",
    ),
    Plant(
        "flow.folded",
        BOTH,
        f"UPDATE documents SET state = 3, ended_at = 0 WHERE number = {FIRST.format(1)}",
        "a document that ended without a word",
    ),
    Plant("flow.head_order", BOTH, f"UPDATE flows SET head_order = 999 WHERE customer = {ACME}"),
    Plant(
        "flow.head_order",
        BOTH,
        f"UPDATE flows SET head_order = NULL, head_since = NULL WHERE customer = {ACME}",
        "none",
    ),
    Plant("flow.head_since", BOTH, f"UPDATE flows SET head_since = NULL WHERE customer = {ACME}"),
    Plant("flow.claimed_to", BOTH, f"UPDATE flows SET claimed_to = 9999 WHERE customer = {ACME}"),
    Plant(
        "flow.claimed_to",
        SQLITE,
        f"UPDATE flows SET claimed_to = 0 WHERE customer = {ACME}",
        "too low",
    ),
    Plant(
        "flow.next_elsewhere",
        POSTGRES,
        f"UPDATE flows SET next_elsewhere = 9999 WHERE customer = {ACME} AND head_since > 0",
    ),
    Plant("flow.head_bound", SQLITE, f"UPDATE flows SET head_bound = NULL WHERE customer = {ACME}"),
    Plant("flow.running", SQLITE, f"UPDATE flows SET running = 7 WHERE customer = {LTD}"),
    Plant("flow.running", SQLITE, f"UPDATE flows SET running = 0 WHERE customer = {LTD}", "none"),
    Plant("customer.running", POSTGRES, f"UPDATE flows SET running = 7 WHERE customer = {LTD}"),
    Plant(
        "customer.running",
        POSTGRES,
        f"UPDATE flows SET running = 0 WHERE customer = {LTD}",
        "none",
    ),
    Plant("flow.held", BOTH, "UPDATE flows SET held = {true} WHERE customer = " + ACME),
    Plant("flow.held", BOTH, "UPDATE flows SET held = {false} WHERE customer = " + LTD, "open"),
    Plant(
        "flow.copies",
        POSTGRES,
        f"""INSERT INTO flows (customer, level, version, place, tick, folded, running, taken,
            claimed_to, held)
        SELECT customer, level, -7, place, tick, folded, running, array_fill(0, ARRAY[9]),
            claimed_to, held
        FROM flows WHERE customer = {ACME}""",
    ),
    Plant("customer.waiting", SQLITE, f"UPDATE flows SET waiting = 9 WHERE customer = {ACME}"),
    Plant("customer.waiting", POSTGRES, f"UPDATE flows SET taken[1] = 9 WHERE customer = {ACME}"),
    Plant(
        "customer.waiting",
        POSTGRES,
        f"UPDATE customers SET arrived[1] = arrived[1] + 3 WHERE number = {ACME}",
        "arrived",
    ),
    Plant(
        "customer.stored_bytes",
        BOTH,
        f"UPDATE customers SET stored_bytes = stored_bytes - 1 WHERE number = {ACME}",
    ),
    Plant(
        "customer.stored_bytes",
        POSTGRES,
        f"INSERT INTO released_bytes (customer, bytes) SELECT {ACME}, 5",
        "released",
    ),
    Plant("customer.delayed", SQLITE, f"UPDATE customers SET delayed = 5 WHERE number = {ACME}"),
    Plant("customer.counted", SQLITE, f"UPDATE customers SET counted = 0 WHERE number = {LTD}"),
    Plant(
        "customer.submitted", POSTGRES, f"UPDATE customers SET submitted = 0 WHERE number = {ACME}"
    ),
    Plant(
        "customer_state.weight",
        BOTH,
        """INSERT INTO customer_states (customer, weight, paused, recent_costs)
        VALUES ("""
        + ACME
        + ", 5000, {false}, '{empty}')",
    ),
    Plant(
        "customer_state.running_max", BOTH, f"DELETE FROM customer_states WHERE customer = {LTD}"
    ),
    Plant(
        "customer_state.paused",
        BOTH,
        "UPDATE customer_states SET paused = {true} WHERE customer = " + LTD,
    ),
    Plant("limited.missing", POSTGRES, f"DELETE FROM limited_customers WHERE customer = {LTD}"),
    Plant("queue.waiting", SQLITE, "UPDATE queue SET waiting_1 = waiting_1 + 4"),
    Plant("queue.waiting", POSTGRES, "UPDATE scheduler_states SET taken[1] = taken[1] + 4"),
    Plant(
        "queue.waiting",
        POSTGRES,
        "UPDATE arrival_counters SET arrived[2] = 17 WHERE shard = 3",
        "arrived",
    ),
    Plant("queue.delayed", SQLITE, "UPDATE queue SET delayed = 3"),
    Plant("queue.delayed", POSTGRES, "UPDATE scheduler_states SET promoted = promoted - 2"),
    Plant("queue.counted", SQLITE, "UPDATE queue SET counted = 0"),
    Plant("level.weight", SQLITE, "UPDATE levels SET weight = 0 WHERE weight > 0"),
    Plant(
        "level.weight",
        POSTGRES,
        "UPDATE scheduler_states SET weights = array_fill(0::bigint, ARRAY[9])",
    ),
    Plant(
        "level.weight",
        POSTGRES,
        "UPDATE scheduler_states SET weights = ARRAY(SELECT least(w, 1) FROM unnest(weights) w)",
        "too low",
    ),
    Plant(
        "level.weight",
        POSTGRES,
        "UPDATE scheduler_states SET weights[5] = 1000",
        "where none waits",
    ),
    Plant(
        "level.places_from",
        POSTGRES,
        "UPDATE scheduler_states SET places_from = array_fill(1000000000000000, ARRAY[9])",
    ),
    Plant(
        "queue.heads_from",
        POSTGRES,
        "UPDATE scheduler_states SET kind_heads_from = ARRAY[9000000000000000000]",
    ),
    Plant(
        "queue.leases_from",
        POSTGRES,
        "UPDATE scheduler_states SET leases_from = 9000000000000000000",
    ),
    Plant("queue.events_from", POSTGRES, "UPDATE scheduler_states SET events_from = '9000000000'"),
    Plant("lease.running", BOTH, "UPDATE leases SET running = running + 1"),
    Plant("lease.until", BOTH, "UPDATE leases SET until = 9000000000000000000"),
    Plant("lease.missing", BOTH, "DELETE FROM leases"),
    Plant(
        "lease.missing",
        SQLITE,
        "UPDATE leases SET documents = '[]', running = 0",
        "not in its lease",
    ),
    Plant(
        "lease.missing",
        POSTGRES,
        "UPDATE leases SET documents = '{{}}', running = 0",
        "not in its lease",
    ),
    Plant("document.returned", BOTH, "UPDATE documents SET returned = {true} WHERE state = 3"),
    Plant("document.failed", POSTGRES, "UPDATE documents SET failed = true WHERE state = 1"),
    Plant(
        "document.delayed_until", POSTGRES, "UPDATE documents SET delayed_until = 1 WHERE state = 3"
    ),
    Plant(
        "document.delayed_until",
        POSTGRES,
        "UPDATE documents SET delayed_until = NULL WHERE state = 0",
        "never due",
    ),
    Plant(
        "document.level", BOTH, f"UPDATE documents SET level = 7 WHERE number = {FIRST.format(1)}"
    ),
    Plant(
        "document.order_number",
        POSTGRES,
        f"UPDATE documents SET order_number = NULL WHERE number = {FIRST.format(1)}",
    ),
    Plant("document.step", BOTH, f"UPDATE documents SET step = 7 WHERE number = {FIRST.format(1)}"),
    Plant("document.step", BOTH, "DELETE FROM attempts WHERE outcome = 2", "a step is gone"),
    Plant("document.expiration", BOTH, "DELETE FROM expirations"),
    Plant(
        "document.expiration",
        BOTH,
        "UPDATE expirations SET expires_at = expires_at + 1",
        "another time",
    ),
    Plant("attempt.orphan", BOTH, "UPDATE attempts SET document = document + 777"),
    Plant("checkpoint.orphan", BOTH, "INSERT INTO checkpoints VALUES (777, '1')"),
    Plant("flow.orphan", BOTH, f"DELETE FROM customers WHERE number = {OLD}"),
    Plant(
        "customer_state.orphan",
        BOTH,
        """INSERT INTO customer_states (customer, weight, paused, recent_costs)
        VALUES (777, 5000, {false}, '{empty}')""",
    ),
    Plant("limited.orphan", POSTGRES, "INSERT INTO limited_customers VALUES (777)"),
    Plant(
        "key.orphan", BOTH, f"UPDATE idempotency_keys SET customer = 777 WHERE customer = {ACME}"
    ),
    Plant("result.orphan", BOTH, "UPDATE results SET document = document + 777"),
    Plant("children.orphan", POSTGRES, "INSERT INTO children VALUES (777, 1)"),
    Plant("body.orphan", SQLITE, "INSERT INTO bodies VALUES (777, 'x')"),
)


def cases(is_wanted: Callable[[Plant, str], bool] = lambda plant, place: True) -> list[Any]:
    """Return each damage on each store that can have it."""
    return [
        pytest.param(plant, place, id="-".join(filter(None, (plant.kind, plant.label, place))))
        for plant in PLANTS
        for place in (SQLITE, POSTGRES)
        if plant.where in (place, BOTH) and is_wanted(plant, place)
    ]


def statement_of(plant: Plant, place: str) -> str:
    if is_address(place):
        return plant.statement.format(true="true", false="false", empty="{}")
    return plant.statement.format(true="1", false="0", empty="[]")


def build(place: str, clock: ManualClock) -> AnyStore:
    """Create documents in every state, and fold all events."""
    store = opened(place, clock=clock, settings=Settings(waiting_per_customer_max=100))
    store.adjust("ltd", CustomerSettings(limit=1))
    store.submit([new("old"), new("acme", key="first"), new("acme"), new("acme")])
    claims = store.claim(4, worker="w", lease_us=LEASE_US).claims
    store.finish(
        [
            Failed(claim.fence, "no") if n == 3 else Completed(claim.fence, '"done"')
            for n, claim in enumerate(claims)
        ]
    )
    store.submit([new(customer) for customer in ("acme", "ltd") for _ in range(4)])
    store.submit([new("beta")])
    store.submit([new("acme", due_at=clock.now() + 3_600 * SECOND_US)])
    assert len(store.claim(3, worker="w", lease_us=LEASE_US).claims) == 3
    assert damages(place) == []
    return store


def add_steps_and_expiries(store: AnyStore, clock: ManualClock) -> None:
    """Let a document finish a step, and submit others that may expire."""
    running = store.claim(1, worker="w", lease_us=LEASE_US).claims
    store.finish([Advanced(claim.fence, "default", "1") for claim in running])
    due_at, expires_at = (clock.now() + hours * 3_600 * SECOND_US for hours in (1, 2))
    store.submit(
        [new("beta", expires_at=expires_at), new("beta", due_at=due_at, expires_at=expires_at)]
    )


@pytest.mark.parametrize(("plant", "place"), cases(), indirect=["place"])
def test_a_damage_is_found_and_repaired(plant: Plant, place: str) -> None:
    clock = ManualClock(START)
    with closing(build(place, clock)) as store:
        if plant.kind in {"document.step", "document.expiration", "attempt.orphan"}:
            add_steps_and_expiries(store, clock)
        if plant.kind == "queue.events_from":
            store.submit([new("acme")])
        if plant.kind == "flow.orphan":
            execute(place, f"DELETE FROM documents WHERE customer = {OLD}")
        execute(place, statement_of(plant, place))
    states = states_of(place)

    found = damages(place)
    repaired = doctor(place, "--repair")

    assert any(f"({plant.kind})" in sentence for sentence in found)
    assert {line["state"] for line in repaired} == {"repaired", "ok"}
    assert plant.kind in {line.get("kind") for line in repaired}
    assert damages(place) == []
    assert states_of(place) == states
    with closing(opened(place, clock=clock)) as store:
        assert_numbers_are_those_of_documents(store, states)
        assert_every_waiting_document_is_claimed_within_limits(store, clock)
    assert damages(place) == []


def states_of(place: str) -> dict[int, tuple[str, int]]:
    """Return the customer and the state of every document."""
    query = (
        "SELECT d.number, c.name, d.state FROM documents d JOIN customers c ON c.number = customer"
    )
    if is_address(place):
        with psycopg.connect(place) as connection:
            connection.execute("SET search_path = fairturn")
            rows = connection.execute(query).fetchall()
    else:
        with closing(apsw.Connection(place)) as file:
            rows = file.execute(query).fetchall()
    return {number: (name, state) for number, name, state in rows}


def assert_numbers_are_those_of_documents(
    store: AnyStore, states: dict[int, tuple[str, int]]
) -> None:
    counted = Counter(states.values())
    summary = store.summary()
    assert (summary.delayed, summary.waiting, summary.running) == tuple(
        sum(n for (_, each), n in counted.items() if each == state) for state in range(3)
    )
    for customer in store.customers().customers:
        assert (customer.delayed, customer.waiting, customer.running) == tuple(
            counted[customer.name, state] for state in range(3)
        )


def assert_every_waiting_document_is_claimed_within_limits(
    store: AnyStore, clock: ManualClock
) -> None:
    """Includes delayed documents and those of dead workers."""
    clock.advance(3_601)
    left = {
        document.id
        for document in find_all(
            store, Filter(states=(State.WAITING, State.DELAYED, State.RUNNING))
        )
    }
    while claims := store.claim(100, worker="w", lease_us=LEASE_US).claims:
        names = [claim.document.customer for claim in claims]
        assert names.count("ltd") <= 1
        left -= {claim.document.id for claim in claims}
        assert store.finish([Completed(claim.fence) for claim in claims]) == []
    assert left == set()


def test_a_document_without_its_customer_is_found_and_left_for_a_backup(place: str) -> None:
    with closing(build(place, ManualClock(START))):
        execute(place, f"DELETE FROM customers WHERE number = {OLD}")

    lines = doctor(place, "--repair")

    wrong = [line for line in lines if line["state"] == "wrong"]
    assert {line["kind"] for line in wrong} == {"document.orphan"}
    assert "restore it from a backup" in wrong[0]["finding"]


def test_doctor_ends_with_1_while_a_damage_is_there_and_with_0_once_it_is_repaired(
    place: str,
) -> None:
    with closing(opened(place)) as store:
        store.submit([new("acme")])
        store.claim(1, worker="w", lease_us=LEASE_US)
        store.submit([new("acme")])
    command = ("doctor", "--thorough", "--database", place)
    execute(place, "UPDATE leases SET running = 5")

    found = fairturn(*command)
    repaired = fairturn(*command, "--repair")
    clean = fairturn(*command)

    assert (found.exit_code, repaired.exit_code, clean.exit_code) == (1, 0, 0)
    sentence = "the number of running documents with fence 1 is 5, and should be 1 (lease.running)"
    assert f"WRONG    recount      {sentence}" in found.stdout
    assert f"FIXED    recount      {sentence}" in repaired.stdout
    assert "FIXED" not in clean.stdout


def test_a_repair_beside_processes_at_work_leaves_a_queue_that_is_whole(place: str) -> None:
    with closing(opened(place)) as store, ThreadPoolExecutor(2) as pool:
        store.adjust("ltd", CustomerSettings(limit=2))
        store.submit([new("acme"), new("ltd")])
        store.claim(1, worker="w", lease_us=LEASE_US)
        stop = Event()
        done = [pool.submit(_work, place, stop, name) for name in ("acme", "ltd")]
        try:
            for _ in range(3):
                execute(place, "UPDATE flows SET running = running + 1, folded = folded + 1")
                lines = doctor(place, "--repair")
        finally:
            stop.set()
        for future in done:
            future.result(timeout=30)

    assert lines[-1]["state"] == "ok", lines
    assert damages(place) == []


def test_repair_is_refused_without_thorough(place: str) -> None:
    opened(place).close()

    result = fairturn("doctor", "--repair", "--database", place)

    assert result.exit_code == 2
    assert "--thorough" in result.stderr


# ── Claims repair the flows that stand in their way ──────────────────────────────────────────────

HEALED = {
    ("flow.folded", ""): BOTH,
    ("flow.folded", "a document is gone"): BOTH,
    ("flow.folded", "a document that ended without a word"): BOTH,
    ("flow.folded", "none"): SQLITE,
    ("flow.head_order", ""): SQLITE,  # on PostgreSQL the next claim replaces it
    ("flow.head_order", "none"): SQLITE,
    ("flow.claimed_to", ""): SQLITE,
    ("level.weight", ""): SQLITE,
    ("level.weight", "where none waits"): POSTGRES,
    ("level.weight", "too low"): POSTGRES,
    ("flow.orphan", ""): SQLITE,
}


@pytest.mark.parametrize(
    ("plant", "place"),
    cases(lambda plant, place: HEALED.get((plant.kind, plant.label)) in {place, BOTH}),
    indirect=["place"],
)
def test_a_claim_repairs_a_damaged_flow_and_goes_on_with_the_others(
    plant: Plant, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(START)
    with closing(build(place, clock)) as store:
        if plant.kind == "flow.orphan":
            store.submit([new("old")])
            store.claim(0, worker="w", lease_us=LEASE_US)
        execute(place, statement_of(plant, place))
    completed = {number for number, (_, state) in states_of(place).items() if state == 3}

    with closing(opened(place, clock=clock)) as store:
        waiting = find_all(store, Filter(states=(State.WAITING,)))
        clock.advance(LEASE_S + 1)
        claimed: set[str] = set()
        while claims := store.claim(3, worker="w", lease_us=LEASE_US).claims:
            claimed.update(claim.document.id for claim in claims)
            store.finish([Completed(claim.fence) for claim in claims])
        repairs = store.summary().repairs

    assert {document.id for document in waiting if document.customer != "old"} <= claimed
    assert repairs > 0
    assert "flows" in caplog.text
    assert completed <= {n for n, (_, state) in states_of(place).items() if state == 3}


@pytest.mark.parametrize(
    ("plant", "place"),
    cases(lambda plant, _: plant.kind in {"document.returned", "document.delayed_until"}),
    indirect=["place"],
)
def test_no_claim_takes_a_document_that_has_ended(plant: Plant, place: str) -> None:
    clock = ManualClock(START)
    with closing(build(place, clock)) as store:
        execute(place, statement_of(plant, place))
        # A flow with waiting documents.
        execute(
            place,
            f"""UPDATE documents SET level = (SELECT max(level) FROM flows WHERE folded > 0)
            WHERE customer = {ACME} AND state = 3""",
        )
        ended = {n for n, (_, state) in states_of(place).items() if state >= 3}
        claimed = store.claim(100, worker="w", lease_us=LEASE_US).claims

    assert len(claimed) == 3
    assert {n for n, (_, state) in states_of(place).items() if state >= 3} == ended


def test_claims_look_for_the_head_of_a_customer_that_was_paused(place: str) -> None:
    clock = ManualClock(START)
    settings = Settings(mode=Mode.EQUAL, patience_s=60)
    with closing(opened(place, clock=clock, settings=settings)) as store:
        store.adjust("off", CustomerSettings(paused=True))
        store.submit([new("off")])
        store.claim(1, worker="w", lease_us=LEASE_US)
        clock.advance(61)
        store.submit([new(f"customer{n}") for n in range(5) for _ in range(8)])
        store.claim(9, worker="w", lease_us=100 * LEASE_US)
        clock.advance(61)
        # The tenth claim is one for patience, and finds a head that is younger than that of the
        # paused customer.
        store.claim(1, worker="w", lease_us=LEASE_US)
        store.adjust("off", CustomerSettings())
        (claim,) = store.claim(1, worker="w", lease_us=LEASE_US).claims

        assert claim.document.customer != "off"
        assert damages(place) == []


def test_doctor_reports_the_repairs_of_claims(place: str) -> None:
    with closing(opened(place)) as store:
        store.submit([new("acme")])
        before = _line(place, "repairs")
        store.claim(1, worker="w", lease_us=LEASE_US)
        store.submit([new("beta"), new("beta")])
        store.claim(1, worker="w", lease_us=LEASE_US)
        execute(place, "DELETE FROM documents WHERE state = 1")
        assert store.claim(1, worker="w", lease_us=LEASE_US).claims == []

    assert before["state"] == "ok"
    assert _line(place, "repairs")["state"] == "warning"
    assert "repaired 1 flow " in _line(place, "repairs")["finding"]


def _line(place: str, check: str) -> dict[str, Any]:
    result = fairturn("doctor", "--json", "--database", place)
    (line,) = [line for line in lines_of(result) if line["check"] == check]
    return line


def test_another_mode_can_be_chosen_while_the_head_of_a_customer_is_unknown(place: str) -> None:
    clock = ManualClock(START)
    with closing(build(place, clock)) as store:
        execute(place, f"UPDATE flows SET head_since = NULL WHERE customer = {ACME}")
        store.configure(replace(store.settings(), mode=Mode.EQUAL))

        assert damages(place) == []
        assert_every_waiting_document_is_claimed_within_limits(store, clock)
