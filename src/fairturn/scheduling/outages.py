"""Outages of services: when a service holds the kinds of work that need it, when a claim may probe
it, and how the work resumes. Pure.

A handler that finds a service unavailable ends its attempt with a report. Reports of two documents
hold the service. While it is held, a claim takes one document at a time as a probe. A success of
an attempt that was claimed since then ends the hold, and the number of running documents rises step
by step. PostgreSQL does the same in `functions/outage.sql`; tests compare both.

Attempts are ordered by the numbers of their fences, so that steps of the clock do not confuse those
claimed before and after the hold began.
"""

from typing import NamedTuple

REPORTS_WITHIN_US = 60_000_000  # two documents that report within this time begin a hold
# Reports use no attempt until the hold has had this many probes and the document has been returned
# this often. With the first condition alone, two documents that probe in turns would soon be dead.
PROBES_FREE = 20
PROBE_US = 5_000_000  # the first interval of probes, unless a report names another
PROBE_US_MIN = 1_000_000
PROBE_US_MAX = 60_000_000  # the longest interval, unless a report asks for more
PROBE_GROWTH_MAX = 8  # times the first interval
RETRY_AFTER_US_MAX = 3_600_000_000  # the longest interval that a report can ask for
RESUME_US = 5_000_000  # after a hold, until the number of running documents is unlimited
RESUME_STEP_US = 500_000  # it doubles after each
OF_KIND = "kind:"  # the prefix of the service that stands for a kind alone


class ServiceState(NamedTuple):
    """The state of a service since its last outage began: a row of `outages`."""

    began_at: int  # the first report
    reported_at: int  # the last report
    document: int | None  # that reported last, by number; None after a success
    error: str
    first_interval_us: int
    interval_us: int  # between probes
    fence: int  # of the last claim when the hold began or ended
    held: bool
    probes: int  # of this hold that found the service unavailable
    probe_at: int  # from when on a claim may take a probe
    probe_set_at: int  # when that was decided
    resumed_at: int | None  # when the last hold ended


class Report(NamedTuple):
    """A report of one attempt."""

    document: int  # its number
    fence: int
    error: str
    retry_after_us: int
    others_wait: bool  # whether another document of the same kind waits


class ReportResult(NamedTuple):
    """The state after a report, and what becomes of the document."""

    state: ServiceState
    delay_us: int
    counts: bool  # whether the hold has had `PROBES_FREE` probes, so that attempts may count

    def uses_attempt(self, returned: int) -> bool:
        """Return whether the attempt counts, as a failure, of a document that was returned this
        often without using one."""
        return self.counts and returned >= PROBES_FREE


def service_of_kind(kind: str) -> str:
    """Return the service that stands for a kind alone."""
    return OF_KIND + kind


def after_report(
    state: ServiceState | None, report: Report, *, last_fence: int, now: int
) -> ReportResult:
    """Return the state after a report, the delay of the document, and whether the attempt counts.
    `last_fence` is the fence of the last claim of the queue."""
    interval = min(max(report.retry_after_us, PROBE_US_MIN), RETRY_AFTER_US_MAX)
    if state is not None and state.held:
        return _after_report_while_held(state, report, interval, now)
    if state is not None and is_over(state, now):
        state = None
    if state is not None and state.resumed_at is not None and report.fence <= state.fence:
        # The attempt was claimed during the outage that is over.
        return ReportResult(state, interval, counts=False)
    is_second = state is not None and state.document not in (None, report.document)
    held = is_second or not report.others_wait
    reported = ServiceState(
        began_at=now if state is None or state.document is None else state.began_at,
        reported_at=now,
        document=report.document,
        error=report.error,
        first_interval_us=interval,
        interval_us=interval,
        fence=last_fence if held or state is None else state.fence,
        held=held,
        probes=0,
        probe_at=now + interval,
        probe_set_at=now,
        resumed_at=None if held or state is None else state.resumed_at,
    )
    delay_us = _delay_while_held(reported, report, now) if held else interval
    return ReportResult(reported, delay_us, counts=False)


def _after_report_while_held(
    state: ServiceState, report: Report, interval: int, now: int
) -> ReportResult:
    counts = state.probes >= PROBES_FREE
    state = state._replace(reported_at=now, document=report.document, error=report.error)
    if report.fence > state.fence:  # a probe; others were in flight when the hold began
        most = max(
            state.first_interval_us, min(PROBE_GROWTH_MAX * state.first_interval_us, PROBE_US_MAX)
        )
        grown = max(interval, min(state.interval_us * 3 // 2, most))
        state = state._replace(
            probes=state.probes + 1, interval_us=grown, probe_at=now + grown, probe_set_at=now
        )
    return ReportResult(state, _delay_while_held(state, report, now), counts)


def _delay_while_held(state: ServiceState, report: Report, now: int) -> int:
    """Return the delay of a document until the next probe, or until the one after it if that can be
    another document."""
    until_probe = min(max(0, state.probe_at - now), state.interval_us)
    return until_probe + (state.interval_us if report.others_wait else 0)


def after_success(
    state: ServiceState, fence: int, *, last_fence: int, now: int
) -> ServiceState | None:
    """Return the state after an attempt with this fence has completed a step or the document of a
    kind that needs the service; None if nothing is left to remember."""
    if state.held:
        return resumed(state, last_fence=last_fence, now=now) if fence > state.fence else state
    if state.resumed_at is None:
        return None
    return state._replace(document=None)


def after_probe(state: ServiceState, fence: int, *, now: int) -> ServiceState:
    """Return the state after an attempt has ended neither with a success nor with a report on this
    service: a probe permits the next one after the same interval."""
    if not state.held or fence <= state.fence:
        return state
    return state._replace(probe_at=now + state.interval_us, probe_set_at=now)


def probed(state: ServiceState, *, now: int, lease_us: int) -> ServiceState:
    """Return the state after a claim has taken a probe. If its worker dies, or if it takes longer
    than one lease, another one may follow."""
    return state._replace(probe_at=now + lease_us, probe_set_at=now)


def resumed(state: ServiceState, *, last_fence: int, now: int) -> ServiceState:
    """Return the state after the hold has ended."""
    return state._replace(document=None, fence=last_fence, held=False, probes=0, resumed_at=now)


def may_probe(state: ServiceState, now: int) -> bool:
    """Return whether a claim may take a document although the service is held. If the clock has
    stepped back to a time before this was decided, it may."""
    return not state.probe_set_at <= now < state.probe_at


def running_max(state: ServiceState, now: int) -> int | None:
    """Return how many documents of each kind may run while the work resumes; None: any number."""
    if state.held or state.resumed_at is None or not 0 <= now - state.resumed_at < RESUME_US:
        return None
    return 1 << (now - state.resumed_at) // RESUME_STEP_US


def is_over(state: ServiceState, now: int) -> bool:
    """Return whether the state has no effect and can be deleted."""
    if state.held or running_max(state, now) is not None:
        return False
    return state.document is None or not 0 <= now - state.reported_at <= REPORTS_WITHIN_US
