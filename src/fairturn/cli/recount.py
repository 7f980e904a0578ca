"""The recount of `fairturn doctor --thorough`, and repairs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

from fairturn.cli.terminal import number, progress
from fairturn.stores.inspection import UNREPAIRABLE, Damage, Damages, describe

# A repair applies pending events, which can reveal further damage.
_ROUNDS_MAX = 3

Advance = Callable[[int, int], None]


class CheckResult(NamedTuple):
    """The result of one check; `state` is ok, warning, wrong or repaired."""

    state: str
    check: str
    finding: str
    damage: Damage | None = None

    def as_json(self) -> dict[str, Any]:
        value = {"check": self.check, "state": self.state, "finding": self.finding}
        if self.damage is None:
            return value
        kind, _, name, place, stored, truth = self.damage
        values = {"kind": kind, "customer": name, "place": place, "stored": stored, "true": truth}
        return value | values


ok, warning, wrong, repaired = (
    partial(CheckResult, state) for state in ("ok", "warning", "wrong", "repaired")
)


class Recountable(Protocol):
    def recount(self, advance: Advance) -> Iterator[Damage]: ...


def recount_findings(
    examined: Callable[[], AbstractContextManager[Recountable]],
    repair: Callable[[Damages, Advance], None] | None,
) -> Iterator[CheckResult]:
    """Compare all derived values with the documents; with `repair`, repair them and compare
    again."""
    damages = _recount(examined)
    if repair is not None and damages.n:
        before = damages
        for _ in range(_ROUNDS_MAX):
            with progress("Repairing") as advance:
                repair(damages, advance)
            damages = _recount(examined)
            if not damages.is_repairable:
                break
        yield from _repaired(before, damages)
    for damage in damages.shown:
        hint = "; restore it from a backup" if damage.kind in UNREPAIRABLE else ""
        yield wrong("recount", describe(damage) + hint, damage)
    if damages.n > len(damages.shown):
        more = damages.n - len(damages.shown)
        yield wrong("recount", f"{number(more, 'value')} more that do not agree")
    if repair is None and damages.is_repairable:
        yield warning("recount", "repair it with: fairturn doctor --thorough --repair")
    if not damages.n:
        yield ok("recount", "counters, flows and leases agree with the documents")


def _recount(examined: Callable[[], AbstractContextManager[Recountable]]) -> Damages:
    with examined() as examiner, progress("Recounting") as advance:
        return Damages(examiner.recount(advance))


def _repaired(before: Damages, after: Damages) -> Iterator[CheckResult]:
    left = {damage.identity for damage in after.shown}
    for damage in before.shown:
        if damage.identity not in left:
            yield repaired("recount", describe(damage), damage)
    if before.n > len(before.shown):
        more = before.n - max(len(before.shown), after.n)
        yield repaired("recount", f"{number(max(more, 0), 'value')} more")
