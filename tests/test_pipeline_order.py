"""The order in which the store in memory serves documents that advance, are snoozed and expire,
compared with the reference."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairturn.clock import SECOND_US, ManualClock
from fairturn.model import (
    Advanced,
    Claim,
    Completed,
    CustomerSettings,
    Failed,
    Fence,
    KindPolicy,
    KindSettings,
    NewDocument,
    Outcome,
    Released,
    Settings,
    Snoozed,
    weight_in_thousandths,
)
from fairturn.scheduling.flows import COST_ONE, Costs, Mode
from fairturn.stores.memory import MemoryStore
from tests.reference import LEASE_US, Document, Reference

START = 1_700_000_000 * SECOND_US
KINDS = ("default", "ocr", "text")
EXAMPLES = settings().max_examples  # of the active profile


class Submit(NamedTuple):
    customer: str
    kind: str
    n: int
    cost: int | None
    due_in_s: int | None
    expires_in_s: int | None


class Take(NamedTuple):
    """One claim of some kinds."""

    kinds: tuple[str, ...]


class End(NamedTuple):
    """The end of an attempt; `attempt` counts back from the last claim."""

    attempt: int
    how: str
    kind: str
    seconds: int


class Adjust(NamedTuple):
    customer: str
    weight: float
    limit: int | None
    paused: bool


class Pause(NamedTuple):
    kind: str
    paused: bool


class Wait(NamedTuple):
    seconds: int


class Expire(NamedTuple):
    """Record what has expired without a claim."""


Operation = Submit | Take | End | Adjust | Pause | Wait | Expire
kinds = st.sampled_from(KINDS)
submits = st.builds(
    Submit,
    customer=st.sampled_from("abc"),
    kind=kinds,
    n=st.integers(1, 4),
    cost=st.none() | st.sampled_from([0, COST_ONE // 2, 3 * COST_ONE]),
    due_in_s=st.sampled_from([None, None, None, 1, 5]),
    expires_in_s=st.sampled_from([None, None, 6, 30, 90]),
)
takes = st.builds(Take, st.sets(kinds, min_size=1).map(sorted).map(tuple))
ends = st.builds(
    End,
    attempt=st.integers(0, 4),
    how=st.sampled_from(["completed", "advanced", "advanced", "snoozed", "failed", "released"]),
    kind=kinds,
    seconds=st.integers(0, 5),
)
adjusts = st.builds(
    Adjust,
    customer=st.sampled_from("abc"),
    weight=st.sampled_from([0.5, 1.0, 1.0, 3.0]),
    limit=st.sampled_from([None, None, 1, 2]),
    paused=st.sampled_from([False, False, True]),
)
pauses = st.builds(Pause, kinds, st.booleans())
waits = st.builds(Wait, st.sampled_from([1, 5, 61, 130]))
expires = st.just(Expire())
programs = st.lists(
    submits
    | submits
    | takes
    | takes
    | takes
    | ends
    | ends
    | ends
    | adjusts
    | pauses
    | waits
    | expires,
    max_size=60,
)


class Comparison:
    """A store and the reference side by side."""

    def __init__(self, mode: Mode, costs: Costs) -> None:
        self.clock = ManualClock(START)
        self.store = MemoryStore(
            settings=Settings(mode=mode, costs=costs, attempts_max=3, kinds=KindPolicy.OPEN),
            clock=self.clock,
        )
        self.reference = Reference(mode=mode.value, costs=costs.value, attempts_max=3)
        self.paused: set[str] = set()
        self.documents: dict[str, Document] = {}  # by the id in the store
        self.attempts: list[tuple[Fence, Document]] = []
        for kind in KINDS:
            self.store.configure_kind(kind, KindSettings())

    def run(self, operation: Operation) -> None:
        now = self.clock.now()
        match operation:
            case Submit():
                self._submit(operation, now)
            case Take():
                self._take(operation.kinds, now)
            case End():
                self._end(operation, now)
            case Adjust(customer, weight, limit, paused):
                adjusted = CustomerSettings(weight=weight, limit=limit, paused=paused)
                self.store.adjust(customer, adjusted)
                thousandths = weight_in_thousandths(weight)
                self.reference.set(customer, now, thousandths, limit, paused)
            case Pause(kind, paused):
                self.store.configure_kind(kind, KindSettings(paused=paused))
                self.paused = self.paused | {kind} if paused else self.paused - {kind}
            case Wait(seconds):
                self.clock.advance(seconds)
            case Expire():
                assert self.store.expire() == len(self.reference.expire(now))

    def _submit(self, submit: Submit, now: int) -> None:
        times = [
            None if seconds is None else now + seconds * SECOND_US
            for seconds in (submit.due_in_s, submit.expires_in_s)
        ]
        new = NewDocument(
            submit.customer,
            "1",
            cost=submit.cost,
            due_at=times[0],
            expires_at=times[1],
            kind=submit.kind,
        )
        for receipt in self.store.submit([new] * submit.n):
            fields: dict[str, Any] = {"cost": submit.cost, "kind": submit.kind}
            document = self.reference.submit(
                submit.customer, now, due_at=times[0], expires_at=times[1], **fields
            )
            assert (receipt.count, receipt.priority) == (document.count, document.priority)
            self.documents[receipt.id] = document

    def _take(self, served: Sequence[str], now: int) -> Claim | None:
        self.reference.expire(now)
        free = [kind for kind in served if kind not in self.paused]
        expected = self.reference.claim(now, kinds=free)
        claims = self.store.claim(1, worker="w", lease_us=LEASE_US, kinds=served).claims
        assert [self.documents[c.document.id] for c in claims] == expected
        for claimed, document in zip(claims, expected, strict=True):
            found = claimed.document
            assert (found.kind, found.attempts, found.step) == (
                document.kind,
                document.attempts,
                document.step,
            )
            self.attempts.append((claimed.fence, document))
        return claims[0] if claims else None

    def _end(self, end: End, now: int) -> None:
        if not self.attempts:
            return
        fence, document = self.attempts.pop(-1 - end.attempt % len(self.attempts))
        delay_us = end.seconds * SECOND_US
        outcomes: dict[str, Outcome] = {
            "completed": Completed(fence, real_cost=delay_us),
            "advanced": Advanced(fence, end.kind, real_cost=delay_us),
            "snoozed": Snoozed(fence, delay_us),
            "failed": Failed(fence, "x", delay_us),
            "released": Released(fence),
        }
        if self.store.finish([outcomes[end.how]]):
            return  # it has lost its lease
        match end.how:
            case "completed":
                self.reference.finish(document, now, delay_us)
            case "advanced":
                self.reference.advance(document, now, end.kind, delay_us)
            case "snoozed":
                self.reference.snooze(document, now, delay_us)
            case "failed":
                self.reference.fail(document, now, delay_us)
            case "released":
                self.reference.release(document, now)


@pytest.mark.parametrize("costs", list(Costs))
@pytest.mark.parametrize("mode", list(Mode))
@given(program=programs)
@settings(max_examples=EXAMPLES, deadline=None)
def test_the_store_claims_the_documents_of_pipelines_in_the_order_of_the_reference(
    mode: Mode, costs: Costs, program: list[Operation]
) -> None:
    comparison = Comparison(mode, costs)
    for operation in program:
        comparison.run(operation)
    for kind in KINDS:
        comparison.run(Pause(kind, paused=False))
    for _ in range(100):
        if comparison._take(KINDS, comparison.clock.now()) is None:
            break
