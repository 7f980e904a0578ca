"""The recount of `fairturn doctor --thorough`, and its repairs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from fairturn.cli.terminal import number, progress
from fairturn.stores.inspection import UNREPAIRABLE, Damage, Damages, describe

# A repair may bring to light what unapplied events have hidden.
_ROUNDS_MAX = 3

Advance = Callable[[int, int], None]


class Finding(NamedTuple):
    """One check: ok, a warning, wrong or repaired; and a sentence."""

    check: str
    state: str
    finding: str
    damage: Damage | None = None

    def as_json(self) -> dict[str, Any]:
        """For programs; a damage comes with its values."""
        value = {"check": self.check, "state": self.state, "finding": self.finding}
        if self.damage is None:
            return value
        kind, _, name, place, stored, truth = self.damage
        values = {"kind": kind, "customer": name, "place": place, "stored": stored, "true": truth}
        return value | values


class Recounted(Protocol):
    """A queue that can be recounted."""

    def recount(self, advance: Advance) -> Iterator[Damage]: ...


def recount_findings(
    examined: Callable[[], AbstractContextManager[Recounted]],
    repair: Callable[[Damages, Advance], None] | None,
) -> Iterator[Finding]:
    """Compare everything that is derived from the documents with them; then repair it, if that is
    wanted, and compare again."""
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
        yield Finding("recount", "wrong", describe(damage) + hint, damage)
    if damages.n > len(damages.shown):
        more = damages.n - len(damages.shown)
        yield Finding("recount", "wrong", f"{number(more, 'value')} more that do not agree")
    if repair is None and damages.is_repairable:
        yield Finding("recount", "warning", "repair it with: fairturn doctor --thorough --repair")
    if not damages.n:
        yield Finding("recount", "ok", "counters, flows and leases agree with the documents")


def _recount(examined: Callable[[], AbstractContextManager[Recounted]]) -> Damages:
    with examined() as examiner, progress("Recounting") as advance:
        return Damages(examiner.recount(advance))


def _repaired(before: Damages, after: Damages) -> Iterator[Finding]:
    left = {damage.identity for damage in after.shown}
    for damage in before.shown:
        if damage.identity not in left:
            yield Finding("recount", "repaired", describe(damage), damage)
    if before.n > len(before.shown):
        more = before.n - max(len(before.shown), after.n)
        yield Finding("recount", "repaired", f"{number(max(more, 0), 'value')} more")
