"""The rows of the store in memory: customers, kinds of work and documents."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from fairturn.model import (
    AttemptRecord,
    ContentRef,
    CustomerSettings,
    Document,
    KindSettings,
    NewDocument,
    Progress,
    State,
)
from fairturn.priority import Count
from fairturn.scheduling.flows import Pick, kind_of
from fairturn.stores.transitions import Attempt

# The fields of a `Document` that a submission states, and their names in `NewDocument`.
_SUBMITTED = {
    field: name
    for field in Document._fields
    if (name := field.removesuffix("_json")) in NewDocument._fields
}


@dataclass(slots=True, eq=False)
class CustomerRow:
    number: int
    name: str
    settings: CustomerSettings
    count: Count | None = None


@dataclass(slots=True, eq=False)
class KindRow:
    number: int
    name: str
    settings: KindSettings


@dataclass(slots=True, eq=False)
class DocumentRow:
    """A document. It has more than 15 attributes because it has all columns of a document."""

    number: int
    new: NewDocument
    customer: CustomerRow
    count: int
    priority: int
    band: int
    submitted_at: int
    state: State
    due_at: int | None
    order: int | None
    retry_at: int | None = None  # on the boot clock, as leases are
    attempts: int = 0
    fence: int = 0
    children: int = 0
    pick: Pick | None = None
    worker: str | None = None
    claimed_at: int | None = None
    lease_until: int = 0
    ended_at: int | None = None
    error: str | None = None
    cancel_requested: bool = False
    result: str | None = None
    result_content: ContentRef | None = None
    progress: Progress | None = None
    real_cost: int | None = None
    expires_at: int | None = None
    step: int = 0
    checkpoint: str | None = None
    snoozes: int = 0
    records: list[AttemptRecord] = field(default_factory=list)

    def attempt(self, attempts_max: int | None) -> Attempt:
        assert self.order is not None
        assert self.claimed_at is not None
        pick = self.pick
        return Attempt(
            customer=self.customer.number,
            band=self.band,
            order=self.order,
            attempts=self.attempts,
            cancelled=self.cancel_requested,
            claimed_at=self.claimed_at,
            cost=pick.cost if pick else None,
            weight=pick.weight if pick else None,
            charge=pick.charge if pick else None,
            attempts_max=attempts_max,
            step=self.step,
            snoozes=self.snoozes,
        )

    @property
    def kind(self) -> int:
        return kind_of(self.band)

    @property
    def expiry(self) -> int | None:
        return None if self.expires_at is None else self.document("").expiry

    @property
    def contents(self) -> Iterator[str]:
        """The names of the contents that belong to the document."""
        refs = [self.result_content, *(record.content for record in self.records)]
        yield from (ref.name for ref in refs if ref is not None)
        if self.new.content_name is not None:
            yield self.new.content_name

    def document(self, id: str) -> Document:
        return Document(
            id=id,
            state=self.state,
            priority=self.priority,
            count=self.count,
            submitted_at_us=self.submitted_at,
            due_at_us=self.due_at,
            order=self.order,
            attempts=self.attempts,
            claimed_at_us=self.claimed_at,
            ended_at_us=self.ended_at,
            worker=self.worker,
            error=self.error,
            cancel_requested=self.cancel_requested,
            real_cost=self.real_cost,
            progress=self.progress,
            step=self.step,
            expires_at_us=self.expires_at,
            **{field: getattr(self.new, name) for field, name in _SUBMITTED.items()},
        )
