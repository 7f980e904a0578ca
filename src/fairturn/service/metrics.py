"""Numbers for Prometheus, read from the store when they are asked for.

Nothing is counted in this process, so it does not matter how many there are, or which is asked.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fairturn.clock import SECOND_US
from fairturn.explain.snapshot import waiting_since
from fairturn.model import Document, Filter, State, Summary
from fairturn.priority import LEVELS
from fairturn.service.administration import workers_of
from fairturn.service.callers import Overseer
from fairturn.service.responses import problems
from fairturn.service.service import Service, service_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RECENT = 1_000
_QUANTILES = (0.5, 0.95, 0.99)

router = APIRouter(tags=["metrics"])


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {
            "description": "In the text format of Prometheus.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
        **problems(),
    },
)
def get_metrics(request: Request, caller: Overseer) -> Response:
    """The numbers of the queue, for Prometheus. It takes a reader's key."""
    registry = CollectorRegistry()
    registry.register(_Collector(service_of(request)))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE)


class _Collector:
    """Reads the store once for each scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        return []  # or the registry would read the store to find the names

    def collect(self) -> Iterator[Metric]:
        store, now = self._service.queue.store, self._service.clock.now()
        summary = store.summary()
        yield from _present(summary)
        yield from _since_ever(summary)
        yield _oldest(store.oldest_waiting(), now)
        alive = [worker for worker in workers_of(self._service) if worker.alive]
        yield GaugeMetricFamily("fairturn_workers", "Workers with a recent heartbeat.", len(alive))
        slots = sum(worker.slots for worker in alive)
        yield GaugeMetricFamily(
            "fairturn_worker_slots", "Documents that workers can run at the same time.", slots
        )
        yield GaugeMetricFamily(
            "fairturn_idle_places",
            "Worker slots without a document.",
            max(0, slots - summary.running),
        )
        yield from _recent(store.find(Filter(), size=RECENT).documents)
        yield from self._customers()

    def _customers(self) -> Iterator[Metric]:
        """By customer, if that was asked for: the first so many by name, and no more."""
        most = self._service.plan.customers_in_metrics
        if not most:
            return
        waiting = GaugeMetricFamily(
            "fairturn_customer_waiting_documents", "Documents that wait.", labels=["customer"]
        )
        running = GaugeMetricFamily(
            "fairturn_customer_running_documents", "Documents in workers.", labels=["customer"]
        )
        for customer in self._service.queue.store.customers(size=most).customers:
            waiting.add_metric([customer.name], customer.waiting)
            running.add_metric([customer.name], customer.running)
        yield waiting
        yield running


def _present(summary: Summary) -> Iterator[Metric]:
    waiting = GaugeMetricFamily(
        "fairturn_waiting_documents", "Documents that wait.", labels=["priority"]
    )
    for priority, n in enumerate(summary.waiting_by_priority, 1):
        waiting.add_metric([str(priority)], n)
    yield waiting
    yield GaugeMetricFamily(
        "fairturn_delayed_documents", "Documents that are not due yet.", summary.delayed
    )
    yield GaugeMetricFamily("fairturn_running_documents", "Documents in workers.", summary.running)


def _since_ever(summary: Summary) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "fairturn_started_documents", "Attempts that were ever begun.", summary.started
    )
    ended = CounterMetricFamily(
        "fairturn_ended_documents", "Documents that ever ended so.", labels=["state"]
    )
    ended.add_metric([State.COMPLETED], summary.completed)
    ended.add_metric([State.DEAD], summary.dead)
    ended.add_metric([State.CANCELLED], summary.cancelled)
    yield ended
    yield CounterMetricFamily(
        "fairturn_retried_attempts",
        "Attempts that failed, or lost their lease, and were not the last.",
        summary.retried,
    )
    yield CounterMetricFamily(
        "fairturn_repairs",
        "Repairs that claims made because flows did not agree with the documents.",
        summary.repairs,
    )


def _oldest(since: Mapping[int, int], now: int) -> Metric:
    oldest = GaugeMetricFamily(
        "fairturn_oldest_waiting_seconds",
        "How long the oldest waiting document has waited; 0 where none waits.",
        labels=["level"],
    )
    for level in range(1, LEVELS + 1):
        oldest.add_metric([str(level)], max(0, now - since.get(level, now)) / SECOND_US)
    return oldest


def _recent(documents: list[Document]) -> Iterator[Metric]:
    """Of the 1,000 documents that were submitted last: their states, their waits, and how long
    their handlers took."""
    states = GaugeMetricFamily(
        "fairturn_recent_documents", f"Of the last {RECENT:,} submitted.", labels=["state"]
    )
    found = Counter(document.state for document in documents)
    for state in State:
        states.add_metric([state.value], found[state])
    yield states
    yield _quantiles(
        "fairturn_recent_wait_seconds",
        f"Waits of those of the last {RECENT:,} submitted that were started.",
        [d.claimed_at - waiting_since(d) for d in documents if d.claimed_at is not None],
    )
    yield _quantiles(
        "fairturn_recent_run_seconds",
        f"How long those of the last {RECENT:,} submitted ran that have completed.",
        [
            d.ended_at - d.claimed_at
            for d in documents
            if d.state is State.COMPLETED and d.ended_at is not None and d.claimed_at is not None
        ],
    )


def _quantiles(name: str, about: str, spans_us: list[int]) -> Metric:
    """Nothing where there is nothing yet: 0 would say that it is fast."""
    quantiles = GaugeMetricFamily(name, about, labels=["quantile"])
    spans = sorted(max(0, span) for span in spans_us)
    for quantile in _QUANTILES if spans else ():
        place = min(len(spans) - 1, int(quantile * len(spans)))
        quantiles.add_metric([str(quantile)], spans[place] / SECOND_US)
    return quantiles
