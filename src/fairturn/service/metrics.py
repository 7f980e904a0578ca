"""Prometheus metrics, read from the store on each scrape.

Nothing is counted in the process: every process of the service returns the same values.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fairturn.clock import SECOND_US
from fairturn.explain.snapshot import waiting_since
from fairturn.model import ENDED, Document, Filter, Kind, ServiceOutage, State, Summary
from fairturn.priority import LEVELS
from fairturn.queue import kinds_of
from fairturn.service.administration import workers_of
from fairturn.service.callers import Overseer
from fairturn.service.responses import TEXT, returns
from fairturn.service.service import Service, service_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RECENT = 1_000
_QUANTILES = (0.5, 0.95, 0.99)

router = APIRouter(tags=["metrics"])


@router.get(
    "/metrics",
    response_class=Response,
    responses=returns("Metrics in the Prometheus text format.", "text/plain", TEXT),
)
def get_metrics(request: Request, caller: Overseer) -> Response:
    """Retrieve metrics in the Prometheus text format, with a reader's or an operator's key."""
    registry = CollectorRegistry()
    registry.register(_MetricsCollector(service_of(request)))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE)


class _MetricsCollector:
    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        return []  # otherwise the registry calls `collect` to find the names

    def collect(self) -> Iterator[Metric]:
        store, now = self._service.queue.queries, self._service.clock.now()
        summary = store.summary()
        yield from _gauges(summary)
        yield from _counters(summary)
        yield _oldest(store.oldest_waiting(), now)
        alive = [worker for worker in workers_of(self._service) if worker.alive]
        yield GaugeMetricFamily("fairturn_workers", "Workers with a recent heartbeat.", len(alive))
        slots = sum(worker.slots for worker in alive)
        yield GaugeMetricFamily(
            "fairturn_worker_slots", "Documents that workers can run at the same time.", slots
        )
        yield GaugeMetricFamily(
            "fairturn_idle_slots",
            "Worker slots without a document.",
            max(0, slots - summary.running),
        )
        yield from _kinds(kinds_of(store, now))
        yield from _outages(store.outages(), now)
        yield from _recent(store.find(Filter(), size=RECENT).documents)
        yield from self._customers()

    def _customers(self) -> Iterator[Metric]:
        """Yield metrics by customer, for the first `customers_in_metrics` customers by name."""
        customers_max = self._service.plan.customers_in_metrics
        if not customers_max:
            return
        waiting = GaugeMetricFamily(
            "fairturn_customer_waiting_documents", "Waiting documents.", labels=["customer"]
        )
        running = GaugeMetricFamily(
            "fairturn_customer_running_documents", "Running documents.", labels=["customer"]
        )
        for customer in self._service.queue.queries.customers(size=customers_max).customers:
            waiting.add_metric([customer.name], customer.waiting)
            running.add_metric([customer.name], customer.running)
        yield waiting
        yield running


def _gauges(summary: Summary) -> Iterator[Metric]:
    waiting = GaugeMetricFamily(
        "fairturn_waiting_documents", "Waiting documents.", labels=["priority"]
    )
    for priority, n in enumerate(summary.waiting_by_priority, 1):
        waiting.add_metric([str(priority)], n)
    yield waiting
    yield GaugeMetricFamily(
        "fairturn_delayed_documents", "Documents that are not due yet.", summary.delayed
    )
    yield GaugeMetricFamily("fairturn_running_documents", "Running documents.", summary.running)


def _kinds(kinds: Iterable[Kind]) -> Iterator[Metric]:
    """Yield metrics by kind of work; a queue has at most `KINDS_MAX`."""
    waiting = GaugeMetricFamily(
        "fairturn_kind_waiting_documents", "Waiting documents.", labels=["kind"]
    )
    running = GaugeMetricFamily(
        "fairturn_kind_running_documents", "Running documents.", labels=["kind"]
    )
    workers = GaugeMetricFamily(
        "fairturn_kind_workers", "Workers with a recent heartbeat that serve it.", labels=["kind"]
    )
    paused = GaugeMetricFamily(
        "fairturn_kind_paused", "Whether an operator has paused it: 0 or 1.", labels=["kind"]
    )
    for kind in kinds:
        waiting.add_metric([kind.name], kind.waiting)
        running.add_metric([kind.name], kind.running)
        workers.add_metric([kind.name], kind.workers)
        paused.add_metric([kind.name], int(kind.settings.paused))
    yield from (waiting, running, workers, paused)


def _outages(outages: Iterable[ServiceOutage], now: int) -> Iterator[Metric]:
    """Yield metrics of services that hold kinds of work, or that work resumes from; handlers and
    kinds name the services, so there are few."""
    held = GaugeMetricFamily(
        "fairturn_outage_held",
        "Whether the service holds kinds of work: 1, or 0 while work resumes.",
        labels=["service"],
    )
    since = GaugeMetricFamily(
        "fairturn_outage_seconds",
        "Time since the service was first reported as unavailable.",
        labels=["service"],
    )
    probes = GaugeMetricFamily(
        "fairturn_outage_probes",
        "Attempts since the hold began that found the service unavailable.",
        labels=["service"],
    )
    for outage in outages:
        held.add_metric([outage.service], int(outage.resumed_at_us is None))
        since.add_metric([outage.service], max(0, now - outage.began_at_us) / SECOND_US)
        probes.add_metric([outage.service], outage.probes)
    yield from (held, since, probes)


def _counters(summary: Summary) -> Iterator[Metric]:
    yield CounterMetricFamily("fairturn_started_documents", "Attempts started.", summary.started)
    ended = CounterMetricFamily(
        "fairturn_ended_documents", "Documents that ended, by final state.", labels=["state"]
    )
    for state in ENDED:
        ended.add_metric([state], getattr(summary, state))
    yield ended
    yield CounterMetricFamily(
        "fairturn_retried_attempts",
        "Attempts that failed or lost their lease, and were followed by another one.",
        summary.retried,
    )
    yield CounterMetricFamily(
        "fairturn_repairs",
        "Flows that claims corrected because they did not agree with the documents.",
        summary.repairs,
    )


def _oldest(since: Mapping[int, int], now: int) -> Metric:
    oldest = GaugeMetricFamily(
        "fairturn_oldest_waiting_seconds",
        "Age of the oldest waiting document; 0 if none waits.",
        labels=["level"],
    )
    for level in range(1, LEVELS + 1):
        oldest.add_metric([str(level)], max(0, now - since.get(level, now)) / SECOND_US)
    return oldest


def _recent(documents: list[Document]) -> Iterator[Metric]:
    """Yield states, waits and run times of the newest 1,000 documents."""
    states = GaugeMetricFamily(
        "fairturn_recent_documents", f"The newest {RECENT:,} documents.", labels=["state"]
    )
    found = Counter(document.state for document in documents)
    for state in State:
        states.add_metric([state.value], found[state])
    yield states
    yield _quantiles(
        "fairturn_recent_wait_seconds",
        f"Waits of the newest {RECENT:,} documents, as far as they have started.",
        [d.claimed_at_us - waiting_since(d) for d in documents if d.claimed_at_us is not None],
    )
    yield _quantiles(
        "fairturn_recent_run_seconds",
        f"Run times of the newest {RECENT:,} documents, as far as they have completed.",
        [
            d.ended_at_us - d.claimed_at_us
            for d in documents
            if d.state is State.COMPLETED
            and d.ended_at_us is not None
            and d.claimed_at_us is not None
        ],
    )


def _quantiles(name: str, about: str, spans_us: list[int]) -> Metric:
    """Return percentiles, or no samples if there are no values: 0 would read as fast."""
    quantiles = GaugeMetricFamily(name, about, labels=["quantile"])
    spans = sorted(max(0, span) for span in spans_us)
    for quantile in _QUANTILES if spans else ():
        place = min(len(spans) - 1, int(quantile * len(spans)))
        quantiles.add_metric([str(quantile)], spans[place] / SECOND_US)
    return quantiles
