"""Outages: kinds of work that are held while a service that they need is unavailable."""

from collections import Counter

import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.model import (
    ERROR_BYTES_MAX,
    KINDS_MAX,
    SERVICES_MAX,
    Advanced,
    Claim,
    Completed,
    Failed,
    KindSettings,
    OutageReport,
    Outcome,
    Released,
    ServiceOutage,
    Settings,
    Snoozed,
    State,
    Stopped,
)
from fairturn.scheduling.outages import (
    PROBE_US_MAX,
    PROBES_FREE,
    REPORTS_WITHIN_US,
    RESUME_US,
    service_of_kind,
)
from fairturn.stores.conformance.explanations import document_snapshot, place
from fairturn.stores.conformance.steps import (
    LEASE_S,
    START,
    assert_numbers_are_exact,
    claim,
    claim_one,
    complete,
    customers_of,
    document,
    ids,
    prune_all,
    snapshot,
    state,
    submit,
    submit_each,
    with_kinds,
)
from fairturn.stores.conformance.suite import OpenAgain, OpenStore, StoreSuite
from fairturn.stores.contract import QueueStore as Store

RETRY_S = 4
SERVICE = "azure-ocr"
NEEDS = {"ocr": [SERVICE], "text": [SERVICE, "gpu"]}


def unavailable(
    claimed: Claim, retry_after_s: float = RETRY_S, service: str | None = None
) -> OutageReport:
    return OutageReport(claimed.fence, "no answer", round(retry_after_s * SECOND_US), service)


def report(store: Store, *claims: Claim, service: str | None = None) -> None:
    assert store.finish([unavailable(each, service=service) for each in claims]) == []


def hold(store: Store, kind: str = "ocr", service: str | None = None) -> None:
    """Let two documents of other customers report an outage, and cancel them. Documents of the kind
    that wait are claimed and released."""
    submit_each(store, ["y-reported", "z-reported"], kind=kind)
    found = claim(store, 100, kinds=[kind])
    reported = [c for c in found if c.document.customer.endswith("reported")]
    outcomes: list[Outcome] = [Released(c.fence) for c in found if c not in reported]
    outcomes += [unavailable(each, service=service) for each in reported]
    assert store.finish(outcomes) == []
    store.cancel(ids(reported))


def services(store: Store) -> list[str]:
    return [outage.service for outage in store.outages()]


class OutagePromises(StoreSuite):
    """`OutageReport`, `Store.outages` and `Store.resume`."""

    @pytest.fixture
    def needy(self, kinds: Store) -> Store:
        """A store whose kinds ocr and text need the same service."""
        kinds.sign_on("w", 4, ["ocr", "text"], needs=NEEDS)
        return kinds

    # ── How a hold begins ────────────────────────────────────────────────────────────────────────

    def test_one_report_returns_its_document_and_holds_nothing(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        first, second = submit(kinds, kind="ocr").id, submit(kinds, kind="ocr").id
        clock.advance(1)

        report(kinds, claim_one(kinds))

        found = document(kinds, first)
        assert (found.state, found.due_at_us) == (State.DELAYED, START + 5 * SECOND_US)
        assert (found.attempts, found.error) == (0, "no answer")
        assert kinds.attempts(first) == []
        assert kinds.summary().retried == 0
        assert kinds.outages() == []
        assert ids(claim(kinds)) == [second]
        assert_numbers_are_exact(kinds)

    def test_reports_of_two_documents_hold_their_kind(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        submit_each(kinds, "abc", kind="ocr")
        other = submit(kinds, "d", kind="text").id
        first, second = claim(kinds, 2, kinds=["ocr"])
        clock.advance(1)
        report(kinds, first)
        clock.advance(30)

        report(kinds, second)

        began_at = START + SECOND_US
        assert kinds.outages() == [
            ServiceOutage(
                service="kind:ocr",
                kinds=("ocr",),
                began_at_us=began_at,
                error="no answer",
                probes=0,
                probe_at_us=began_at + (30 + RETRY_S) * SECOND_US,
                resumed_at_us=None,
            )
        ]
        assert ids(claim(kinds, 5)) == [other]

    def test_reports_in_one_call_with_a_claim_hold_in_that_claim(self, kinds: Store) -> None:
        submit_each(kinds, "abc", kind="ocr")
        reports = [unavailable(each) for each in claim(kinds, 2)]

        assert claim(kinds, outcomes=reports) == []

    def test_two_reports_of_one_document_do_not_hold(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        id = submit(kinds, "a", kind="ocr").id
        submit_each(kinds, "b", kind="ocr", due_at=START)
        report(kinds, claim_one(kinds))
        clock.advance(RETRY_S)
        again, _ = sorted(claim(kinds, 2), key=lambda c: c.document.id != id)
        submit(kinds, "c", kind="ocr")

        report(kinds, again)

        assert kinds.outages() == []

    def test_reports_more_than_a_minute_apart_do_not_hold(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        submit_each(kinds, "abc", kind="ocr")
        first, second = claim(kinds, 2, lease_us=3_600 * SECOND_US)
        report(kinds, first)
        clock.advance((REPORTS_WITHIN_US + 1) / SECOND_US)

        report(kinds, second)

        assert kinds.outages() == []

    def test_a_success_between_two_reports_forgets_the_first(self, kinds: Store) -> None:
        submit_each(kinds, "abcd", kind="ocr")
        first, second, third = claim(kinds, 3)

        report(kinds, first)
        complete(kinds, [second])
        report(kinds, third)

        assert kinds.outages() == []

    def test_one_report_holds_if_no_other_document_of_the_kind_waits(self, kinds: Store) -> None:
        submit(kinds, "a", kind="ocr")
        submit(kinds, "b", kind="text")

        report(kinds, claim_one(kinds, kinds=["ocr"]))

        assert services(kinds) == ["kind:ocr"]

    def test_a_service_holds_every_kind_that_needs_it(self, needy: Store) -> None:
        submit_each(needy, "ab", kind="ocr")
        submit_each(needy, "cd", kind="text")
        other = submit(needy, "e").id
        (first,), (second,) = (claim(needy, kinds=[kind]) for kind in ("ocr", "text"))

        report(needy, first, second, service=SERVICE)

        (outage,) = needy.outages()
        assert (outage.service, outage.kinds) == (SERVICE, ("ocr", "text"))
        assert ids(claim(needy, 5)) == [other]

    def test_a_report_of_one_service_does_not_hold_kinds_that_need_another(
        self, needy: Store
    ) -> None:
        submit_each(needy, "abc", kind="text")
        other = submit(needy, "d", kind="ocr").id
        first, second = claim(needy, 2, kinds=["text"])

        report(needy, first, second, service="gpu")

        assert services(needy) == ["gpu"]
        assert ids(claim(needy, 5)) == [other]

    @pytest.mark.parametrize("service", [None, "unknown", "kind:text"])
    def test_a_report_without_a_service_that_the_kind_needs_holds_the_kind_alone(
        self, needy: Store, service: str | None
    ) -> None:
        submit_each(needy, "abc", kind="ocr")
        other = submit(needy, "d", kind="text").id
        first, second = claim(needy, 2, kinds=["ocr"])

        report(needy, first, second, service=service)

        assert services(needy) == ["kind:ocr"]
        assert ids(claim(needy, 5)) == [other]

    def test_a_later_sign_on_replaces_the_services_of_its_kinds(self, needy: Store) -> None:
        needy.sign_on("other", 1, needs={"ocr": []})
        submit_each(needy, "abc", kind="text")
        other = submit(needy, "d", kind="ocr").id
        first, second = claim(needy, 2, kinds=["text"])

        report(needy, first, second, service=SERVICE)

        (outage,) = needy.outages()
        assert outage.kinds == ("text",)
        assert ids(claim(needy, 5)) == [other]

    def test_a_report_counts_although_its_document_is_to_be_cancelled(self, kinds: Store) -> None:
        made = submit_each(kinds, "abc", kind="ocr")
        first, second = claim(kinds, 2)
        kinds.cancel([first.document.id])

        report(kinds, first, second)

        assert state(kinds, made[0].id) is State.CANCELLED
        assert services(kinds) == ["kind:ocr"]

    def test_an_error_is_stored_without_what_no_database_can_hold(self, kinds: Store) -> None:
        id = submit(kinds, kind="ocr").id
        error = "a\x00b\ud800" + "c" * ERROR_BYTES_MAX

        kinds.finish([OutageReport(claim_one(kinds).fence, error)])

        (outage,) = kinds.outages()
        assert outage.error.startswith("a\ufffdb\ufffdccc")
        assert len(outage.error.encode()) == ERROR_BYTES_MAX
        assert document(kinds, id).error == outage.error

    def test_a_stale_report_changes_nothing(self, kinds: Store, clock: ManualClock) -> None:
        submit(kinds, kind="ocr")
        stale = claim_one(kinds)
        clock.advance(LEASE_S + 1)
        claim_one(kinds)
        before = snapshot(kinds)

        assert kinds.finish([unavailable(stale)]) == [stale.fence]

        assert (snapshot(kinds), kinds.outages()) == (before, [])

    def test_a_needed_service_creates_its_kind(self, store: Store) -> None:
        store.sign_on("w", 1, needs={"audio": ["speech"]})

        assert [kind.name for kind in store.kinds()] == ["audio", "default"]

    @pytest.mark.parametrize(
        ("service", "error"),
        [("", "empty"), ("x" * 65, "65 bytes"), ("a\x00", "NUL"), ("kind:ocr", "reserved")],
    )
    def test_an_invalid_service_raises_and_records_nothing(
        self, store: Store, service: str, error: str
    ) -> None:
        with pytest.raises(ValueError, match=error):
            store.sign_on("w", 1, ["ocr"], needs={"ocr": [service]})

        assert (store.workers(), [kind.name for kind in store.kinds()]) == ([], ["default"])

    def test_a_kind_needs_a_bounded_number_of_services(self, store: Store) -> None:
        most = [f"service-{n}" for n in range(SERVICES_MAX)]
        store.sign_on("w", 1, needs={"ocr": most})

        with pytest.raises(ValueError, match="at most 16"):
            store.sign_on("w", 1, needs={"ocr": [*most, "one-more"]})

    def test_services_of_all_kinds_are_stored(self, store: Store) -> None:
        needs = {f"kind-{n}": [f"service-{n}"] for n in range(KINDS_MAX - 1)}
        store.sign_on("w", 1, needs=needs)
        submit(store, kind="kind-98")

        report(store, claim_one(store), service="service-98")

        assert services(store) == ["service-98"]

    # ── Probes ───────────────────────────────────────────────────────────────────────────────────

    def test_after_the_interval_a_claim_takes_one_document_as_a_probe(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        submit_each(kinds, "abc", kind="ocr")
        hold(kinds)
        clock.advance(RETRY_S - 1 / SECOND_US)
        assert claim(kinds, 10) == []

        clock.advance(1 / SECOND_US)

        assert customers_of(claim(kinds, 10)) == "a"
        assert claim(kinds, 10) == []

    def test_one_probe_is_taken_of_all_kinds_that_need_the_service(
        self, needy: Store, clock: ManualClock
    ) -> None:
        hold(needy, service=SERVICE)
        submit_each(needy, "ab", kind="ocr")
        submit_each(needy, "cd", kind="text")
        submit_each(needy, "ef")
        clock.advance(RETRY_S)

        found = [c.document.kind for c in claim(needy, 10)]

        assert sorted(found)[:2] == ["default", "default"]
        assert len(found) == 3

    def test_a_kind_with_two_unavailable_services_is_probed_when_both_permit_it(
        self, needy: Store, clock: ManualClock
    ) -> None:
        hold(needy, "text", service="gpu")
        clock.advance(2)
        hold(needy, "ocr", service=SERVICE)
        submit(needy, kind="text")
        clock.advance(RETRY_S - 2)
        assert services(needy) == [SERVICE, "gpu"]
        assert claim(needy) == []

        clock.advance(2)

        probe = claim_one(needy)
        assert probe.document.kind == "text"
        complete(needy, [probe])
        assert [o.resumed_at_us for o in needy.outages()] == [clock.now()] * 2

    def test_a_report_of_one_service_permits_a_probe_of_the_other_later(
        self, needy: Store, clock: ManualClock
    ) -> None:
        hold(needy, "text", service="gpu")
        hold(needy, "ocr", service=SERVICE)
        submit_each(needy, "ab", kind="text")
        clock.advance(RETRY_S)

        report(needy, claim_one(needy), service="gpu")

        found = {o.service: (o.probes, o.probe_at_us - clock.now()) for o in needy.outages()}
        assert found == {"gpu": (1, 6 * SECOND_US), SERVICE: (0, RETRY_S * SECOND_US)}
        clock.advance(6)
        assert len(claim(needy, 5)) == 1

    def test_the_interval_grows_with_each_probe_to_its_maximum(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        submit_each(kinds, [f"c{n}" for n in range(10)], kind="ocr")
        hold(kinds)
        clock.advance(RETRY_S)
        intervals = []
        for probe in range(1, 9):
            report(kinds, claim_one(kinds))
            (outage,) = kinds.outages()
            assert outage.probes == probe
            intervals.append((outage.probe_at_us - clock.now()) / SECOND_US)
            clock.set(outage.probe_at_us - 1)
            assert claim(kinds) == []
            clock.set(outage.probe_at_us)

        assert intervals == [6, 9, 13.5, 20.25, 30.375, 32, 32, 32]
        assert max(intervals) * SECOND_US < PROBE_US_MAX

    def test_the_next_probe_is_another_document_if_one_waits(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        first, second = submit(kinds, kind="ocr").id, submit(kinds, kind="ocr").id
        hold(kinds)
        clock.advance(RETRY_S)
        probe = claim_one(kinds)
        report(kinds, probe)
        clock.advance(6)

        again = claim_one(kinds)
        report(kinds, again)

        assert [probe.document.id, again.document.id] == [first, second]
        clock.advance(9)
        assert ids(claim(kinds)) == [first]

    def test_the_only_document_is_probed_again_and_again(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        id = submit(kinds, kind="ocr").id
        report(kinds, claim_one(kinds))
        for wait_s in (RETRY_S, 6, 9):
            clock.advance(wait_s)
            probe = claim_one(kinds)
            report(kinds, probe)

        found = document(kinds, id)
        assert (found.state, found.attempts, probe.document.attempts) == (State.DELAYED, 0, 1)

    def test_a_probe_whose_worker_dies_is_followed_by_another(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        submit_each(kinds, "abc", kind="ocr")
        hold(kinds)
        clock.advance(RETRY_S)
        claim_one(kinds)
        clock.advance(LEASE_S - 1)
        assert claim(kinds) == []

        clock.advance(1)

        assert len(claim(kinds, 10)) == 1

    def test_a_probe_that_takes_longer_than_one_lease_is_followed_by_another(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        submit_each(kinds, "abc", kind="ocr")
        hold(kinds)
        clock.advance(RETRY_S)
        probe = claim_one(kinds)
        clock.advance(LEASE_S - 1)
        kinds.renew([probe.fence], lease_us=3_600 * SECOND_US)
        clock.advance(1)

        assert len(claim(kinds, 10)) == 1

    @pytest.mark.parametrize("ending", [Failed, Released, Snoozed, Stopped])
    def test_another_end_of_a_probe_permits_the_next_after_the_same_interval(
        self, kinds: Store, clock: ManualClock, ending: type[Outcome]
    ) -> None:
        submit_each(kinds, "abc", kind="ocr")
        hold(kinds)
        clock.advance(RETRY_S)
        probe = claim_one(kinds)
        clock.advance(2)
        outcomes: dict[type[Outcome], Outcome] = {
            Failed: Failed(probe.fence, "unreadable", 0),
            Released: Released(probe.fence),
            Snoozed: Snoozed(probe.fence, 0),
            Stopped: Stopped(probe.fence),
        }

        kinds.finish([outcomes[ending]])

        clock.advance(RETRY_S - 1 / SECOND_US)
        assert claim(kinds, 10) == []
        clock.advance(1 / SECOND_US)
        assert len(claim(kinds, 10)) == 1
        assert services(kinds) == ["kind:ocr"]

    def test_attempts_in_flight_when_the_hold_began_are_no_probes(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        made = submit_each(kinds, "abcdef", kind="ocr")
        claims = claim(kinds, 5)
        report(kinds, *claims[:2])
        (before,) = kinds.outages()
        clock.advance(1)

        report(kinds, *claims[2:])

        assert kinds.outages() == [before]
        assert [document(kinds, each.id).attempts for each in made] == [0] * 6
        clock.advance(RETRY_S - 1)
        assert len(claim(kinds, 10)) == 1

    def test_reports_use_attempts_after_twenty_probes_of_one_outage(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = with_kinds(open_store(clock=clock, settings=Settings(attempts_max=2)))
        id = submit(store, kind="ocr").id
        report(store, claim_one(store))
        for probe in range(PROBES_FREE + 2):
            assert document(store, id).attempts == max(0, probe - PROBES_FREE)
            clock.advance(3_600)
            report(store, claim_one(store))

        dead = document(store, id)
        assert (dead.state, dead.attempts, dead.error) == (State.DEAD, 2, "no answer")
        records = store.attempts(id)
        assert records is not None
        assert [(r.outcome, r.error) for r in records] == [("failed", "no answer")] * 2

    def test_documents_that_probe_in_turns_are_returned_twenty_times_each(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        both = [submit(kinds, customer, kind="ocr").id for customer in "ab"]
        report(kinds, *claim(kinds, 2))
        probes: Counter[str] = Counter()
        while min(probes[id] for id in both) < PROBES_FREE - 1:
            clock.advance(3_600)
            probe = claim_one(kinds)
            assert probe.document.attempts == 1  # this one
            report(kinds, probe)
            probes[probe.document.id] += 1

        assert [document(kinds, id).attempts for id in both] == [0, 0]
        clock.advance(3_600)
        probe = claim_one(kinds)
        report(kinds, probe)
        assert document(kinds, probe.document.id).attempts == 1

    def test_a_paused_kind_and_a_kind_that_is_not_served_are_not_probed(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        submit(kinds, kind="ocr")
        hold(kinds)
        clock.advance(RETRY_S)
        kinds.configure_kind("ocr", KindSettings(paused=True))
        assert claim(kinds) == []
        kinds.configure_kind("ocr", KindSettings())

        assert claim(kinds, kinds=["text"]) == []
        assert claim(kinds, at_most={"ocr": 0}) == []
        assert len(claim(kinds)) == 1

    def test_a_service_is_probed_although_the_clock_was_set_back(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        submit_each(kinds, "ab", kind="ocr")
        hold(kinds)
        clock.step(-86_400)

        assert len(claim(kinds, 10)) == 1
        assert claim(kinds, 10) == []

    # ── How a hold ends ──────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("advances", [False, True])
    def test_the_success_of_a_probe_ends_the_hold(
        self, kinds: Store, clock: ManualClock, advances: bool
    ) -> None:
        submit_each(kinds, "abc", kind="ocr")
        hold(kinds)
        clock.advance(RETRY_S)
        probe = claim_one(kinds)

        kinds.finish([Advanced(probe.fence, "text") if advances else Completed(probe.fence)])

        (outage,) = kinds.outages()
        assert outage.resumed_at_us == clock.now()
        assert len(claim(kinds, kinds=["ocr"])) == 1

    def test_the_success_of_an_attempt_that_was_claimed_before_does_not_end_the_hold(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        submit_each(kinds, "abcd", kind="ocr")
        first, second, third = claim(kinds, 3)
        report(kinds, first, second)
        clock.advance(1)

        complete(kinds, [third])

        assert services(kinds) == ["kind:ocr"]
        assert claim(kinds) == []

    def test_the_success_of_another_kind_ends_the_hold_of_the_service_that_both_need(
        self, needy: Store, clock: ManualClock
    ) -> None:
        hold(needy, "ocr", service=SERVICE)
        submit(needy, kind="text")
        clock.advance(RETRY_S)

        complete(needy, [claim_one(needy)])

        submit(needy, kind="ocr")
        assert len(claim(needy)) == 1

    def test_work_resumes_step_by_step_in_each_kind(self, needy: Store, clock: ManualClock) -> None:
        for kind in ("ocr", "text"):
            submit_each(needy, [f"{kind}{n}" for n in range(12)], kind=kind)
        hold(needy, service=SERVICE)
        assert needy.resume(SERVICE)
        running = {"ocr": 0, "text": 0}
        found = []
        for _ in range(4):
            for claimed in claim(needy, 100):
                running[claimed.document.kind] += 1
            found.append(dict(running))
            clock.advance(0.5)

        assert found == [{"ocr": n, "text": n} for n in (1, 2, 4, 8)]
        clock.advance(RESUME_US / SECOND_US)
        assert len(claim(needy, 100)) == 8
        assert needy.outages() == []

    def test_documents_that_end_while_work_resumes_make_room_for_others(self, kinds: Store) -> None:
        submit_each(kinds, "abc", kind="ocr")
        hold(kinds)
        kinds.resume("kind:ocr")
        first = claim_one(kinds)
        assert claim(kinds) == []

        complete(kinds, [first])

        assert len(claim(kinds, 10)) == 1

    def test_an_outage_that_goes_on_holds_again(self, kinds: Store, clock: ManualClock) -> None:
        submit_each(kinds, "abcdef", kind="ocr")
        hold(kinds)
        kinds.resume("kind:ocr")
        clock.advance(0.5)
        first, second = claim(kinds, 2)

        report(kinds, first, second)

        (outage,) = kinds.outages()
        assert (outage.resumed_at_us, outage.began_at_us) == (None, clock.now())
        assert claim(kinds) == []

    def test_an_operator_ends_a_hold(self, kinds: Store) -> None:
        submit_each(kinds, "ab", kind="ocr")
        hold(kinds)
        version = kinds.version()

        assert kinds.resume(service_of_kind("ocr"))

        assert kinds.version() != version
        assert len(claim(kinds)) == 1

    def test_there_is_nothing_to_resume_without_a_hold(self, kinds: Store) -> None:
        submit_each(kinds, "ab", kind="ocr")
        report(kinds, claim_one(kinds))
        version = kinds.version()

        assert [kinds.resume(name) for name in ("kind:ocr", "kind:text", "x")] == [False] * 3

        assert kinds.version() == version

    # ── What a hold does not change ──────────────────────────────────────────────────────────────

    def test_a_hold_does_not_change_the_order_of_the_documents_that_wait(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        orders = []
        for held in (False, True):
            store = with_kinds(open_store(clock=clock))
            hold(store)
            for customer in "aab":
                submit(store, customer, kind="ocr")
            if not held:
                store.resume("kind:ocr")
            submit_each(store, "bbc", kind="ocr")
            submit_each(store, "abc", kind="text")
            claim(store, 3, kinds=["text"])
            store.resume("kind:ocr")
            clock.advance(RESUME_US / SECOND_US)
            orders.append(customers_of(claim(store, 10)))

        assert orders[0] == orders[1]
        assert sorted(orders[0]) == list("aabbbc")

    def test_a_held_document_keeps_its_position(self, kinds: Store) -> None:
        hold(kinds)
        made = submit_each(kinds, "aab", kind="ocr")
        held = [place(kinds, each.id).bounds for each in made]

        kinds.resume("kind:ocr")

        assert [place(kinds, each.id).bounds for each in made] == held
        assert [bounds.most for bounds in held] == [0, 2, 1]

    def test_a_snapshot_has_the_outages_of_the_services_that_the_kind_needs(
        self, needy: Store, clock: ManualClock
    ) -> None:
        hold(needy, "text", service="gpu")
        made = {kind: submit(needy, kind=kind).id for kind in ("ocr", "text", "default")}

        def found() -> dict[str, list[str]]:
            snapshots = {kind: document_snapshot(needy, id) for kind, id in made.items()}
            return {kind: [o.service for o in each.outages] for kind, each in snapshots.items()}

        assert found() == {"ocr": [], "text": ["gpu"], "default": []}
        assert document_snapshot(needy, made["text"]).outages == tuple(needy.outages())
        needy.resume("gpu")
        assert found()["text"] == ["gpu"]
        clock.advance(RESUME_US / SECOND_US)
        assert found()["text"] == []

    def test_states_without_effect_are_pruned(self, kinds: Store, clock: ManualClock) -> None:
        submit_each(kinds, "ab", kind="ocr")
        report(kinds, claim_one(kinds))
        assert kinds.prune() is None
        clock.advance((REPORTS_WITHIN_US + 1) / SECOND_US)

        prune_all(kinds)

        assert kinds.prune() is None
        submit(kinds, "c", kind="ocr")
        report(kinds, claim_one(kinds))
        assert kinds.outages() == []

    def test_a_hold_is_not_pruned(self, kinds: Store, clock: ManualClock) -> None:
        hold(kinds)
        clock.advance(366 * 86_400)

        prune_all(kinds)

        assert services(kinds) == ["kind:ocr"]


class DurableOutagePromises(StoreSuite):
    """Outages in a store that several processes share."""

    def test_all_processes_hold_and_resume_together(
        self, kinds: Store, clock: ManualClock, open_again: OpenAgain
    ) -> None:
        other = open_again(kinds, clock=clock)
        kinds.sign_on("w", 1, needs=NEEDS)
        submit_each(kinds, "abc", kind="text")
        hold(kinds, service=SERVICE)

        assert other.outages() == kinds.outages()
        assert claim(other) == []
        clock.advance(RETRY_S)
        probe = claim_one(other)
        assert claim(kinds) == []
        complete(other, [probe])
        assert len(claim(kinds, 10)) == 1

    def test_a_hold_survives_a_restart(
        self, kinds: Store, clock: ManualClock, open_again: OpenAgain
    ) -> None:
        submit_each(kinds, "abc", kind="ocr")
        hold(kinds)
        before = kinds.outages()
        kinds.close()

        again = open_again(kinds, clock=clock)

        assert again.outages() == before
        assert claim(again) == []
