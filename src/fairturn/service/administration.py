"""Routes about the whole queue: the rule, the summary, workers, settings and bulk actions."""

from itertools import islice
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from fairturn.explain.snapshot import ALIVE_US
from fairturn.model import ATTEMPTS_MAX, NUMBER_MAX, SECONDS_MAX, SETTING_NAMES, State
from fairturn.priority import LEVELS, Reset
from fairturn.scheduling.flows import Costs, Mode
from fairturn.service import shapes
from fairturn.service.callers import Operator, Overseer
from fairturn.service.documents import DocumentFilterQuery
from fairturn.service.options import BULK_MAX
from fairturn.service.problems import refusing_misuse
from fairturn.service.responses import problems
from fairturn.service.service import Service, service_of
from fairturn.validation.changes import SettingChanges

router = APIRouter(tags=["queue"])

Seconds = Annotated[shapes.Number | None, Field(ge=0, le=SECONDS_MAX)]
Threshold = Annotated[shapes.Whole, Field(ge=-NUMBER_MAX, le=NUMBER_MAX)]
Limit = Annotated[shapes.Whole | None, Field(ge=1, le=NUMBER_MAX)]


class RuleJson(shapes.ResponseJson):
    """The current priority rule."""

    reset: Reset
    reset_interval_s: float
    bounds: list[int]
    levels: int
    mode: Mode


@router.get("/v1/rule", response_model=RuleJson, responses=problems())
def get_rule(request: Request) -> Any:
    """Retrieve the current priority rule. No access key is required."""
    settings = service_of(request).queue.settings
    return RuleJson(
        reset=settings.reset,
        reset_interval_s=settings.reset_interval_s,
        bounds=list(settings.bounds),
        levels=LEVELS,
        mode=settings.mode,
    )


@router.get("/v1/summary", response_model=shapes.SummaryJson, responses=problems())
def get_summary(request: Request, caller: Overseer) -> Any:
    """Retrieve the counters of the queue."""
    return summary_of(service_of(request))


def summary_of(service: Service) -> shapes.SummaryJson:
    """Return the counters of the queue, live workers and the age of the oldest document."""
    store = service.queue.queries
    summary = store.summary()
    return shapes.SummaryJson(
        waiting=summary.waiting,
        waiting_by_priority=list(summary.waiting_by_priority),
        delayed=summary.delayed,
        running=summary.running,
        started=summary.started,
        completed=summary.completed,
        dead=summary.dead,
        cancelled=summary.cancelled,
        retried=summary.retried,
        repairs=summary.repairs,
        workers=sum(worker.alive for worker in workers_of(service)),
        oldest_waiting_since_at=min(store.oldest_waiting().values(), default=None),
    )


@router.get("/v1/workers", response_model=shapes.WorkersJson, responses=problems())
def list_workers(request: Request, caller: Overseer) -> Any:
    """List workers with a heartbeat in the last 24 hours that have not stopped."""
    return shapes.WorkersJson(workers=workers_of(service_of(request)))


def workers_of(service: Service) -> list[shapes.WorkerJson]:
    now = service.clock.now()
    return [
        shapes.WorkerJson(
            name=seen.worker,
            seen_at=seen.seen_at,
            slots=seen.slots,
            alive=now - seen.seen_at <= ALIVE_US,
        )
        for seen in service.queue.queries.workers()
    ]


class SettingsJson(shapes.ResponseJson):
    """The settings of the queue, the same for every process."""

    mode: Mode
    costs: Costs
    patience_s: float
    reset: Reset
    reset_interval_s: float
    bounds: list[int]
    attempts_max: int
    waiting_max: int
    waiting_per_customer_max: int
    completed_kept_s: float
    cancelled_kept_s: float
    dead_kept_s: float


class SettingsChangeJson(shapes.RequestFields):
    """Settings to change. Omitted settings keep their values."""

    mode: Mode | None = None
    costs: Costs | None = None
    patience_s: Seconds = None
    reset: Reset | None = None
    reset_interval_s: Seconds = None
    bounds: Annotated[list[Threshold] | None, Field(min_length=8, max_length=8)] = None
    attempts_max: Annotated[shapes.Whole | None, Field(ge=1, le=ATTEMPTS_MAX)] = None
    waiting_max: Limit = None
    waiting_per_customer_max: Limit = None
    completed_kept_s: Seconds = None
    cancelled_kept_s: Seconds = None
    dead_kept_s: Seconds = None


@router.get("/v1/settings", response_model=SettingsJson, responses=problems())
def get_settings(request: Request, caller: Overseer) -> Any:
    """Retrieve the current settings."""
    return _settings(service_of(request))


@router.patch("/v1/settings", response_model=SettingsJson, responses=problems())
def change_settings(request: Request, caller: Operator, change: SettingsChangeJson) -> Any:
    """Change settings for every process. Existing priorities and counts do not change."""
    service = service_of(request)
    given = change.model_dump(exclude_none=True)
    changes: SettingChanges = given  # type: ignore[assignment]
    with refusing_misuse():
        service.queue.configure(**changes)
    return _settings(service)


def _settings(service: Service) -> SettingsJson:
    settings = service.queue.settings
    return SettingsJson(**{name: getattr(settings, name) for name in SETTING_NAMES})


class BulkFilterJson(DocumentFilterQuery):
    """Selects documents. An omitted field matches every document."""

    priority: Annotated[
        list[Annotated[shapes.Whole, Field(ge=1, le=LEVELS)]], Field(default_factory=list)
    ]


class BulkActionJson(shapes.RequestFields):
    """An action and the documents to apply it to. Nothing changes unless `dry_run` is false."""

    action: Literal["cancel", "retry"]
    filter: BulkFilterJson
    dry_run: shapes.YesOrNo = True


_CHANGEABLE = {
    "cancel": (State.DELAYED, State.WAITING, State.RUNNING),
    "retry": (State.DEAD,),
}


@router.post("/v1/bulk", response_model=shapes.BulkResultJson, responses=problems())
def act_in_bulk(request: Request, caller: Operator, bulk: BulkActionJson) -> Any:
    """Cancel or retry all documents that match a filter, up to 100,000 per request.

    Matching documents that the action cannot change are skipped: `cancel` applies to delayed,
    waiting and running documents, `retry` to dead ones.
    """
    queue = service_of(request).queue
    filters = bulk.filter.filters(caller)
    possible = _CHANGEABLE[bulk.action]
    filters["states"] = [s for s in possible if not bulk.filter.state or s in bulk.filter.state]
    found: list[str] = []
    if filters["states"]:
        with refusing_misuse():
            found = [each.id for each in islice(queue.iterate(**filters), BULK_MAX + 1)]
    more, ids = len(found) > BULK_MAX, found[:BULK_MAX]
    changed = 0
    if not bulk.dry_run and bulk.action == "cancel":
        changed = sum(s in (State.CANCELLED, State.RUNNING) for s in queue.cancel(ids))
    elif not bulk.dry_run:
        changed = sum(s is State.DEAD for s in queue.retry(ids))
    return shapes.BulkResultJson(matched=len(ids), changed=changed, more=more, dry_run=bulk.dry_run)
