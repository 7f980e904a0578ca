"""The services that kinds of work need, their states, and what they permit a claim to take.

The store in memory keeps one table; the store in a file reads it in a transaction, and writes the
states that have changed.
"""

from collections.abc import Iterable, Mapping, Sequence

from fairturn.model import (
    ERROR_BYTES_MAX,
    Advanced,
    Completed,
    OutageReport,
    Outcome,
    ServiceOutage,
)
from fairturn.scheduling.outages import (
    Report,
    ReportResult,
    ServiceState,
    after_probe,
    after_report,
    after_success,
    is_over,
    may_probe,
    probed,
    resumed,
    running_max,
    service_of_kind,
)
from fairturn.stores.transitions import Ending
from fairturn.validation.text import description


class ServiceTable:
    """The services of each kind, and the services that were reported unavailable."""

    def __init__(
        self,
        needs: Mapping[str, tuple[str, ...]] | None = None,
        states: Mapping[str, ServiceState] | None = None,
    ) -> None:
        self.states = dict(states or {})
        self._needs = dict(needs or {})  # by kind

    def register(self, kind: str, services: Iterable[str]) -> None:
        """Replace the services that a kind needs."""
        self._needs[kind] = tuple(sorted(set(services)))

    def of_kind(self, kind: str) -> tuple[str, ...]:
        return (*self._needs.get(kind, ()), service_of_kind(kind))

    # ── Outcomes ─────────────────────────────────────────────────────────────────────────────────

    def report(
        self,
        number: int,
        kind: str,
        outcome: OutageReport,
        *,
        others_wait: bool,
        last_fence: int,
        now: int,
    ) -> ReportResult:
        """Record a report of an attempt; `number` is that of its document."""
        service = self._reported(kind, outcome)
        error = description(outcome.error, ERROR_BYTES_MAX)
        report = Report(number, outcome.fence.number, error, outcome.retry_after_us, others_wait)
        result = after_report(self.states.get(service), report, last_fence=last_fence, now=now)
        self.states[service] = result.state
        return result

    def _reported(self, kind: str, outcome: OutageReport) -> str:
        if outcome.service in self._needs.get(kind, ()):
            return outcome.service
        return service_of_kind(kind)

    def end(
        self, kind: str, outcome: Outcome, ending: Ending, *, last_fence: int, now: int
    ) -> None:
        """Record what the end of an attempt means for the services of its kind, except for the one
        that it reported."""
        succeeded = isinstance(outcome, Completed | Advanced) and ending.error is None
        reported = self._reported(kind, outcome) if isinstance(outcome, OutageReport) else None
        fence = outcome.fence.number
        for service, state in self._states_of(kind):
            if service == reported:
                continue
            after: ServiceState | None
            if succeeded:
                after = after_success(state, fence, last_fence=last_fence, now=now)
            else:
                after = after_probe(state, fence, now=now)
            if after is None:
                del self.states[service]
            else:
                self.states[service] = after

    def resume(self, service: str, last_fence: int, now: int) -> bool:
        state = self.states.get(service)
        if state is None or not state.held:
            return False
        self.states[service] = resumed(state, last_fence=last_fence, now=now)
        return True

    # ── Claims ───────────────────────────────────────────────────────────────────────────────────

    def running_max(self, kind: str, now: int) -> int | None:
        """Return how many documents of a kind may run while its services resume."""
        limits = (running_max(state, now) for _, state in self._states_of(kind))
        return min((limit for limit in limits if limit is not None), default=None)

    def held(self, kind: str) -> list[str]:
        """Return the services that hold a kind."""
        return [service for service, state in self._states_of(kind) if state.held]

    def may_probe(self, kind: str, now: int) -> bool:
        """Return whether a claim may take a document of a kind that is held."""
        return all(may_probe(s, now) for _, s in self._states_of(kind) if s.held)

    def probe(self, services: Iterable[str], now: int, lease_us: int) -> None:
        """Record that a claim has taken a probe of these services."""
        for service in services:
            self.states[service] = probed(self.states[service], now=now, lease_us=lease_us)

    def _states_of(self, kind: str) -> list[tuple[str, ServiceState]]:
        known = ((service, self.states.get(service)) for service in self.of_kind(kind))
        return [(service, state) for service, state in known if state is not None]

    # ── Queries and retention ────────────────────────────────────────────────────────────────────

    def outages(self, kinds: Sequence[str], now: int) -> list[ServiceOutage]:
        """Return the services that are held or that work resumes from, with those of `kinds` that
        need them."""
        return [
            ServiceOutage(
                service=service,
                kinds=tuple(sorted(kind for kind in kinds if service in self.of_kind(kind))),
                began_at_us=state.began_at,
                error=state.error,
                probes=state.probes,
                probe_at_us=state.probe_at,
                resumed_at_us=state.resumed_at,
            )
            for service, state in sorted(self.states.items())
            if state.held or running_max(state, now) is not None
        ]

    def prune(self, now: int) -> bool:
        """Delete the states of outages that are over; return whether there were any."""
        over = [service for service, state in self.states.items() if is_over(state, now)]
        for service in over:
            del self.states[service]
        return bool(over)
