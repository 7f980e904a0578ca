"""Limits on the arguments of claims and outcomes, the same for every store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fairturn import model
from fairturn.clock import ManualClock
from fairturn.model import (
    CLAIM_DOCUMENTS_MAX,
    COST_MAX,
    LEASE_US_MAX,
    RESULT_BYTES_MAX,
    RETRY_US_MAX,
    RUNNING_MAX,
    WORKER_BYTES_MAX,
    Advanced,
    Completed,
    CustomerSettings,
    Failed,
    Fence,
    NewDocument,
    OutageReport,
    Outcome,
    Settings,
    Snoozed,
    State,
)
from fairturn.scheduling.flows import Costs
from fairturn.stores.contract import QueueStore as Store
from fairturn.stores.memory import MemoryStore
from fairturn.stores.sqlite import SqliteStore
from fairturn.worker import options, results

LEASE_US = 30_000_000
NOBODY = Fence("000000000000000", 1)


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    settings = Settings(costs=Costs.LEARNED)
    clock = ManualClock(1_700_000_000_000_000)
    opened: Store
    if request.param == "memory":
        opened = MemoryStore(settings=settings, clock=clock)
    else:
        opened = SqliteStore(tmp_path / "q.db", settings=settings, clock=clock)
    yield opened
    opened.close()


CLAIMS = {
    "fewer than none": (-1, "w", LEASE_US, "n is -1"),
    "too many": (CLAIM_DOCUMENTS_MAX + 1, "w", LEASE_US, "from 0 to 1,000 documents"),
    "a worker without a name": (1, "", LEASE_US, "worker is empty"),
    "a worker that no database can hold": (1, "\ud800", LEASE_US, "lone surrogate"),
    "a worker with a long name": (1, "w" * (WORKER_BYTES_MAX + 1), LEASE_US, "at most 255"),
    "no lease": (1, "w", 0, "lease_us is 0"),
    "an endless lease": (1, "w", LEASE_US_MAX + 1, r"\(24 hours\)"),
}


@pytest.mark.parametrize("case", CLAIMS)
def test_a_claim_out_of_bounds_is_refused_and_takes_nothing(store: Store, case: str) -> None:
    n, worker, lease_us, sentence = CLAIMS[case]
    store.submit([NewDocument("acme", "1")])

    with pytest.raises(ValueError, match=sentence):
        store.claim(n, worker=worker, lease_us=lease_us)

    assert store.summary().waiting == 1


def test_an_endless_renewal_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match=r"\(24 hours\)"):
        store.renew([NOBODY], lease_us=LEASE_US_MAX + 1)


OUTCOMES: dict[str, tuple[Outcome, str]] = {
    "a result that no database can hold": (Completed(NOBODY, '"\ud800"'), "lone surrogate"),
    "a result that is too long": (Completed(NOBODY, "1" * (RESULT_BYTES_MAX + 1)), "16,777,216"),
    "a retry in a hundred years": (Failed(NOBODY, "no", 100 * RETRY_US_MAX), "at most 366 days"),
    "a snooze for a hundred years": (Snoozed(NOBODY, 100 * RETRY_US_MAX), "at most 366 days"),
    "a step's value that no database can hold": (Advanced(NOBODY, "x", '"\x00"'), "NUL character"),
    "a cost below zero": (Advanced(NOBODY, "x", cost=-1), "cost is -1; it must be from 0"),
    "a cost beyond all measure": (
        Advanced(NOBODY, "x", cost=10**30),
        "from 0 to 1,000,000,000,000",
    ),
    "a service without a name": (OutageReport(NOBODY, "no", service=""), "service is empty"),
    "a service with a long name": (OutageReport(NOBODY, "no", service="x" * 65), "at most 64"),
}


@pytest.mark.parametrize("case", OUTCOMES)
def test_an_outcome_out_of_bounds_is_refused_with_all_of_its_call(store: Store, case: str) -> None:
    outcome, sentence = OUTCOMES[case]
    (receipt,) = store.submit([NewDocument("acme", "1")])
    (claim,) = store.claim(1, worker="w", lease_us=LEASE_US).claims

    for record in (store.finish, lambda all: store.claim(0, worker="w", lease_us=1, outcomes=all)):
        with pytest.raises(ValueError, match=sentence):
            record([Completed(claim.fence), outcome])

    (document,) = [d for d in [store.read(receipt.id)] if d is not None]
    assert document.document.state is State.RUNNING


def test_a_real_cost_beyond_all_measure_counts_as_the_highest_cost(store: Store) -> None:
    for _ in range(3):
        store.submit([NewDocument("acme", "1"), NewDocument("other", "1")])
        for claim in store.claim(1, worker="w", lease_us=LEASE_US).claims:
            store.finish([Completed(claim.fence, real_cost=10**30)])

    assert len(store.claim(9, worker="w", lease_us=LEASE_US).claims) == 3


def test_a_limit_beyond_all_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="from 1 to 1,000,000"):
        CustomerSettings(limit=RUNNING_MAX + 1)


def test_no_cost_leads_near_the_end_of_64_bits() -> None:
    most_of_one_claim = CLAIM_DOCUMENTS_MAX * int(COST_MAX) * 1_000_000 * 1_000 // 10

    assert most_of_one_claim < 2**57


def test_a_child_knows_the_same_limits_as_the_stores() -> None:
    for name in (
        "RESULT_BYTES_MAX",
        "STEP_VALUE_BYTES_MAX",
        "CHECKPOINT_BYTES_MAX",
        "SERVICE_BYTES_MAX",
        "COST_MAX",
    ):
        assert getattr(results, name) == getattr(model, name), name
    assert results.SNOOZE_S_MAX == model.SNOOZE_US_MAX / 1_000_000
    assert options.SERVICES_MAX == model.SERVICES_MAX
