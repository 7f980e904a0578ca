"""How many documents wait and are delayed, kept exact by everything that changes it."""

import apsw

# A flow that is not there has nothing waiting or returned: what comes now is all after claimed_to.
MOVE_FLOW = """
    INSERT INTO flows (customer, level, waiting, claimed_to) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET waiting = waiting + excluded.waiting"""
MOVE_LEVEL = "UPDATE levels SET waiting = waiting + ? WHERE level = ?"
_MOVE_DELAYED = "UPDATE customers SET delayed = delayed + ? WHERE number = ?"
_MOVE_QUEUE_DELAYED = "UPDATE queue SET delayed = delayed + ?"


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

    def write(self, connection: apsw.Connection, next_number: int) -> None:
        """For all but claims, which write flows and levels themselves. `next_number`: what waits
        in a flow that was forgotten meanwhile has a lower order, and was returned."""
        if self.flows:
            flows = [(*flow, n, next_number - 1) for flow, n in self.flows.items()]
            connection.executemany(MOVE_FLOW, flows)
            connection.executemany(MOVE_LEVEL, [(n, p) for p, n in self.levels.items()])
        self.write_delayed(connection)

    def write_delayed(self, connection: apsw.Connection) -> None:
        if self.delayed:
            connection.executemany(_MOVE_DELAYED, [(n, c) for c, n in self.delayed.items()])
            connection.execute(_MOVE_QUEUE_DELAYED, (sum(self.delayed.values()),))
