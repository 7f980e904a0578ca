"""Routes about the whole queue: the rule, the summary, workers, settings and bulk actions."""

from dataclasses import fields
from itertools import islice
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, create_model

from fairturn import wire
from fairturn.explain.snapshot import ALIVE_US
from fairturn.model import (
    NOT_ENDED,
    NUMBER_MAX,
    SECONDS_MAX,
    SETTING_NAMES,
    KindPolicy,
    SettingChanges,
    Settings,
    State,
)
from fairturn.priority import BOUNDS, LEVELS, Reset
from fairturn.scheduling.flows import Costs, Mode
from fairturn.service import shapes
from fairturn.service.callers import Operator, Overseer, Public
from fairturn.service.documents import DocumentFilterQuery
from fairturn.service.options import BULK_MAX
from fairturn.service.problems import refusing_misuse
from fairturn.service.responses import problems
from fairturn.service.service import Service, service_of
from fairturn.validation.filters import Filters, to_filter

router = APIRouter(tags=["queue"])

Seconds = Annotated[shapes.Number | None, Field(ge=0, le=SECONDS_MAX)]
BulkAction = Literal["cancel", "retry"]
Limit = Annotated[shapes.Whole | None, Field(ge=1, le=NUMBER_MAX)]
Threshold = Annotated[shapes.Whole, Field(ge=-NUMBER_MAX, le=NUMBER_MAX)]
Thresholds = Annotated[
    list[Threshold] | None, Field(min_length=len(BOUNDS), max_length=len(BOUNDS))
]


class RuleJson(shapes.ResponseJson):
    """The current priority rule."""

    reset: Reset
    reset_interval_s: float
    bounds: list[int]
    levels: int
    mode: Mode


@router.get("/v1/rule", response_model=RuleJson, responses=problems(), dependencies=[Public])
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
        **wire.to_json(wire.SUMMARY, summary),
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
            kinds=None if seen.kinds is None else list(seen.kinds),
        )
        for seen in service.queue.queries.workers()
    ]


# The types of settings in a response and in a request, by the type of the field of `Settings`.
_TYPES: dict[Any, tuple[Any, Any]] = {
    float: (float, Seconds),
    int: (int, Limit),
    tuple[int, ...]: (list[int], Thresholds),
    **{choice: (choice, choice | None) for choice in (Mode, Costs, Reset, KindPolicy)},
}
_SETTINGS = [(each.name, *_TYPES[each.type]) for each in fields(Settings) if each.init]
_RESPONSE: dict[str, Any] = {name: (type, ...) for name, type, _ in _SETTINGS}
_REQUEST: dict[str, Any] = {name: (type, None) for name, _, type in _SETTINGS}
_response_model: Any = create_model("_Settings", __base__=shapes.ResponseJson, **_RESPONSE)
_request_model: Any = create_model("_Changes", __base__=shapes.RequestFields, **_REQUEST)


class SettingsJson(_response_model):  # type: ignore[misc]  # a model made from a list
    """The settings of the queue, the same for every process."""


class SettingsChangeJson(_request_model):  # type: ignore[misc]  # a model made from a list
    """Settings to change. Omitted settings keep their values."""


@router.get("/v1/settings", response_model=SettingsJson, responses=problems())
def get_settings(request: Request, caller: Overseer) -> Any:
    """Retrieve the current settings."""
    return _settings(service_of(request))


@router.patch("/v1/settings", response_model=SettingsJson, responses=problems())
def change_settings(request: Request, caller: Operator, change: SettingsChangeJson) -> Any:
    """Change settings for every process. Existing priorities and counts do not change."""
    service = service_of(request)
    changes: SettingChanges = change.model_dump(exclude_none=True)
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

    action: BulkAction
    filter: BulkFilterJson
    dry_run: shapes.YesOrNo = True


_CHANGEABLE: dict[BulkAction, tuple[State, ...]] = {"cancel": NOT_ENDED, "retry": (State.DEAD,)}


@router.post("/v1/bulk", response_model=shapes.BulkResultJson, responses=problems())
def act_in_bulk(request: Request, caller: Operator, bulk: BulkActionJson) -> Any:
    """Cancel or retry all documents that match a filter, up to 100,000 per request.

    Matching documents that the action cannot change are skipped: `cancel` applies to delayed,
    waiting and running documents, `retry` to dead ones.
    """
    filters = bulk.filter.filters(caller)
    return change_in_bulk(service_of(request), bulk.action, filters, dry_run=bulk.dry_run)


def change_in_bulk(
    service: Service, action: BulkAction, filters: Filters, *, dry_run: bool
) -> shapes.BulkResultJson:
    """Cancel or retry the documents that match. Raises `Problem` if a filter is wrong."""
    queue, found = service.queue, list[str]()
    with refusing_misuse():
        wanted = to_filter(filters).states
        states = [state for state in _CHANGEABLE[action] if not wanted or state in wanted]
        if states:
            filters["states"] = states
            found = [each.id for each in islice(queue.iterate(**filters), BULK_MAX + 1)]
    more, ids = len(found) > BULK_MAX, found[:BULK_MAX]
    changed = 0
    if not dry_run and action == "cancel":
        changed = sum(s in (State.CANCELLED, State.RUNNING) for s in queue.cancel(ids))
    elif not dry_run:
        changed = sum(s is State.DEAD for s in queue.retry(ids))
    return shapes.BulkResultJson(matched=len(ids), changed=changed, more=more, dry_run=dry_run)
