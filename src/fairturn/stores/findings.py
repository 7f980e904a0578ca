"""What can be said about a queue from outside, whatever it is kept in."""

from typing import NamedTuple


class Findings(NamedTuple):
    """One moment of a queue."""

    settings: str  # JSON, as it is stored
    oldest_waiting_at: int | None
    newest_at: int | None
    running: int
    run_out: int  # documents whose lease ran out, and that nobody has taken back
    run_out_since_us: int | None  # how long ago the first of these leases ended; None: unknown
