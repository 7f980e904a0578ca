"""The live picture of a queue: nine lanes, the customers being served, and their waits."""

from collections import deque
from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.text import Text

from fairturn.clock import SECOND_US, microseconds
from fairturn.model import Customer
from fairturn.priority import LEVELS
from fairturn.worker.events import DocumentClaimed, DocumentEnded, Event

_SERVED_SHOWN = 200
# A document that is served at once would never be visible: after its claim it stays in its lane for
# this time, as a dim small letter.
_STAYS_US = 600_000
_TWO_COLUMNS = 80
_BEFORE_LANE, _AFTER_LANE = 12, 6
_HEADINGS = f"{'customer':<9}{'count':>6}{'served':>7}{'wait':>8}{'longest':>8}"
_NONE = ("", "")
_COLOURS = (
    *("bright_cyan", "bright_green", "bright_yellow", "bright_magenta", "bright_blue"),
    *("cyan", "green", "yellow", "magenta", "blue"),
)


class WorkerProgress:
    """The progress of a worker, updated from the worker's thread."""

    def __init__(self) -> None:
        self.waits: dict[str, list[int]] = {}  # by customer, in the order of the claims
        self.served: deque[str] = deque(maxlen=_SERVED_SHOWN)
        self._lately: deque[tuple[int, int, str]] = deque(maxlen=_SERVED_SHOWN)
        self.took_us: dict[str, int] = {}  # run times by document id

    @property
    def completed(self) -> int:
        return len(self.took_us)

    def served_lately(self, level: int, now: int) -> list[str]:
        """Return the customers of recently claimed documents of a priority, oldest first."""
        return [
            name
            for at, priority, name in list(self._lately)  # a copy: the worker appends meanwhile
            if priority == level and now - at < _STAYS_US
        ]

    def add(self, event: Event) -> None:
        if isinstance(event, DocumentClaimed):
            document = event.document
            assert document.claimed_at_us is not None
            waits = self.waits.setdefault(document.customer, [])
            waits.append(document.claimed_at_us - document.submitted_at_us)
            self.served.append(document.customer)
            self._lately.append((document.claimed_at_us, document.priority, document.customer))
        elif isinstance(event, DocumentEnded):
            self.took_us[event.document.id] = microseconds(event.seconds)


class LanesPicture:
    """Draws the lanes in 80 x 24 characters; in fewer columns the list of customers is longer. Each
    customer has a letter and a colour; the loud one is red."""

    def __init__(self, quiet: Sequence[str], loud: str) -> None:
        self._quiet = quiet
        self._loud = loud
        self._styles = {name: _COLOURS[n % len(_COLOURS)] for n, name in enumerate(quiet)}
        self._styles[loud] = "bold red"

    def draw(
        self,
        title: str,
        customers: Mapping[str, Customer],
        watched: WorkerProgress,
        *,
        now: int,
        width: int,
    ) -> Group:
        room = max(10, width - _BEFORE_LANE - _AFTER_LANE)
        gap = [Text()] if width >= _TWO_COLUMNS else []  # one column of customers needs the lines
        parts = [Text(title), *gap]
        for level in range(1, LEVELS + 1):
            waiting = {
                name: customers[name].waiting_by_priority[level - 1]
                for name in (*self._quiet, self._loud)
                if name in customers
            }
            parts.append(self._lane(level, waiting, watched.served_lately(level, now), room))
        parts += [self._served(watched, room), *gap]
        rows = [self._row(name, customers, watched) for name in self._quiet]
        columns = 2 if width >= _TWO_COLUMNS else 1
        each = -(-len(rows) // columns)
        parts.append(Text("   ".join([_HEADINGS] * columns), "dim"))
        parts += [Text("   ").join(rows[n::each]) for n in range(each)]
        parts.append(self._row(self._loud, customers, watched))
        return Group(*parts)

    def _lane(
        self, level: int, waiting: Mapping[str, int], served: Sequence[str], room: int
    ) -> Text:
        total = sum(waiting.values())
        lane = Text(f"priority {level}  ")
        for name, n in waiting.items():
            # If not all fit, each customer gets its share of the lane, at least one letter.
            letters = n if total <= room else -(-n * room // total)
            lane.append(name[0].upper() * letters, self._styles[name])
        for name in served:
            lane.append(name[0].lower(), f"dim {self._styles[name]}")
        lane.truncate(_BEFORE_LANE + room, pad=True)
        lane.append(f"{total:>{_AFTER_LANE},}" if total else "")
        return lane

    def _served(self, watched: WorkerProgress, room: int) -> Text:
        line = Text("served      ")
        for name in list(watched.served)[-room:]:
            line.append(name[0].upper(), self._styles[name])
        line.append(" now" if watched.served else "", "dim")
        return line

    def _row(self, name: str, customers: Mapping[str, Customer], watched: WorkerProgress) -> Text:
        row = Text(f"{name:<9}", self._styles[name])
        waits = sorted(watched.waits.get(name, []))
        count = customers[name].count if name in customers else 0
        middle, longest = (_short(waits[len(waits) // 2]), _short(waits[-1])) if waits else _NONE
        row.append(f"{count:>6,}{len(waits):>7,}{middle:>8}{longest:>8}", "default")
        return row


def _short(us: int) -> str:
    """Format a wait in at most seven characters, for waits of a demo."""
    return f"{us / SECOND_US:.1f} s" if us >= SECOND_US else f"{us // 1000} ms"
