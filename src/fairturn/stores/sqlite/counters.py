"""How many documents wait and are delayed, kept exact by everything that changes it."""

import apsw

from fairturn.priority import LEVELS

# A flow that is not there has nothing waiting or returned: what comes now is all after claimed_to.
MOVE_FLOW = """
    INSERT INTO flows (customer, level, waiting, claimed_to) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET waiting = waiting + excluded.waiting"""
_MOVE_DELAYED = "UPDATE customers SET delayed = delayed + ? WHERE number = ?"
# A part of an UPDATE of the queue's row; `Tally.counts` are its values.
MOVE_COUNTS = "delayed = delayed + ?, " + ", ".join(
    f"waiting_{n} = waiting_{n} + ?" for n in range(1, LEVELS + 1)
)
_MOVE_QUEUE = f"UPDATE queue SET {MOVE_COUNTS}"


class Tally:
    """How many documents began (or ceased) to wait or to be delayed, to be written at the end."""

    def __init__(self) -> None:
        self.flows: dict[tuple[int, int], int] = {}
        self.levels: dict[int, int] = {}
        self.delayed: dict[int, int] = {}

    def wait(self, customer: int, level: int, priority: int, n: int = 1) -> None:
        place = (customer, level)
        self.flows[place] = self.flows.get(place, 0) + n
        self.levels[priority] = self.levels.get(priority, 0) + n

    def delay(self, customer: int, n: int = 1) -> None:
        self.delayed[customer] = self.delayed.get(customer, 0) + n

    def counts(self) -> tuple[int, ...]:
        """What the queue's row is to be moved by."""
        waiting = (self.levels.get(level, 0) for level in range(1, LEVELS + 1))
        return (sum(self.delayed.values()), *waiting)

    def write(self, connection: apsw.Connection, next_number: int) -> None:
        """For all but claims, which write flows and the queue's row themselves. `next_number`:
        what waits in a flow that was forgotten meanwhile has a lower order, and was returned."""
        if self.flows:
            flows = [(*flow, n, next_number - 1) for flow, n in self.flows.items()]
            connection.executemany(MOVE_FLOW, flows)
        if self.flows or self.delayed:
            connection.execute(_MOVE_QUEUE, self.counts())
        self.write_delayed(connection)

    def write_delayed(self, connection: apsw.Connection) -> None:
        """How many documents of each customer are delayed."""
        if self.delayed:
            connection.executemany(_MOVE_DELAYED, [(n, c) for c, n in self.delayed.items()])
