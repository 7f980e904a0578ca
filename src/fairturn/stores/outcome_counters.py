"""How many attempts and documents ended, and how, since ever."""

from fairturn.model import State, Summary
from fairturn.stores.transitions import Ending


class Ends:
    """What ended otherwise than completed: attempts, and what became of their documents.

    Completed documents are not counted, so that the most frequent of all outcomes writes nothing
    for it: they are the attempts that were begun, less those that run, less these.
    """

    __slots__ = ("attempts", "cancelled", "dead", "retried")

    def __init__(
        self, attempts: int = 0, retried: int = 0, dead: int = 0, cancelled: int = 0
    ) -> None:
        self.attempts = attempts
        self.retried = retried
        self.dead = dead
        self.cancelled = cancelled

    def attempt(self, ending: Ending) -> None:
        """Count an attempt that ended like this."""
        if ending.state is State.COMPLETED:
            return
        self.attempts += 1
        self.dead += ending.state is State.DEAD
        self.cancelled += ending.state is State.CANCELLED
        # Without an error it was given back, which is no failure.
        again = ending.state in (State.DELAYED, State.WAITING)
        self.retried += again and ending.error is not None

    def cancel(self) -> None:
        """Count a document that was cancelled before anybody began."""
        self.cancelled += 1

    def purge(self) -> None:
        """Count an attempt whose document was deleted under it."""
        self.attempts += 1

    @property
    def row(self) -> tuple[int, int, int, int]:
        """As stores keep it, in the order in which it is made of it again."""
        return self.attempts, self.retried, self.dead, self.cancelled


def to_summary(
    waiting_by_priority: tuple[int, ...],
    *,
    delayed: int,
    running: int,
    started: int,
    ends: Ends,
    repairs: int = 0,
) -> Summary:
    """The numbers of a queue, all from one snapshot."""
    return Summary(
        waiting_by_priority=waiting_by_priority,
        delayed=delayed,
        running=running,
        started=started,
        completed=started - running - ends.attempts,
        dead=ends.dead,
        cancelled=ends.cancelled,
        retried=ends.retried,
        repairs=repairs,
    )
