"""What a claim has changed of flows and standings, written back set-wise."""

from fairturn.flows import Mode, Standing
from fairturn.stores.postgres.rows import columns, newest_flow
from fairturn.stores.postgres.session import Session
from fairturn.stores.postgres.shelf import StoredFlow
from fairturn.stores.values import Row
from fairturn.turns import Turns

_FLOW_ARRAYS = """
    unnest(%s::bigint[], %s::smallint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[],
        %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::boolean[])"""
_FLOW_COLUMNS = """
    customer, level, place, tick, folded, running, taken, claimed_to, head_order, head_since,
    head_bound, held"""
_SAVE_FLOWS = f"""
    UPDATE fairturn.flows f SET version = %s, place = v.place, tick = v.tick, folded = v.folded,
        running = v.running, taken = v.taken, claimed_to = v.claimed_to,
        head_order = v.head_order, head_since = v.head_since, head_bound = v.head_bound,
        held = v.held
    FROM {_FLOW_ARRAYS} AS v({_FLOW_COLUMNS})
        CROSS JOIN LATERAL ({newest_flow("ctid AS place_on_disk", "v")}) newest
    WHERE f.ctid = newest.place_on_disk"""
_ADD_FLOWS = f"""
    INSERT INTO fairturn.flows (version, {_FLOW_COLUMNS}) SELECT %s, v.* FROM {_FLOW_ARRAYS} v"""
_SAVE_STANDING = """
    INSERT INTO fairturn.standings (customer, weight, running_max, paused, recent_costs)
    VALUES (%s, %s, %s, %s, %s::bigint[])
    ON CONFLICT (customer) DO UPDATE SET weight = excluded.weight,
        running_max = excluded.running_max, paused = excluded.paused,
        recent_costs = excluded.recent_costs"""
_DROP_STANDINGS = "DELETE FROM fairturn.standings WHERE customer = ANY (%s)"


def save_flows(session: Session, turns: Turns, version: int) -> None:
    """Write every flow that was touched, as of this version of the turns."""
    known: list[Row] = []
    new: list[Row] = []
    by_order = turns.mode is Mode.LEVELS
    slack = turns.patience_us // 2
    for flow in turns.touched:
        assert isinstance(flow, StoredFlow)
        order = flow.head_order
        standing = turns.standings[flow.customer]
        is_head = order is not None and order == standing.head_order
        since = standing.head_since if is_head else None
        bound = flow.bound
        if since is None or bound is None or not bound <= since <= bound + slack:
            bound = since
        flow.since, flow.bound, flow.held = since, bound, standing.held
        row = (
            flow.customer,
            flow.level,
            (order or 0) if by_order else flow.virtual_time,
            flow.tick,
            flow.waiting,
            flow.running,
            flow.taken,
            flow.claimed_to,
            order,
            since,
            bound,
            flow.held,
        )
        (known if flow.stored else new).append(row)
        flow.stored = True
    if known:
        session.ask(_SAVE_FLOWS, (version, *columns(known)))
    if new:
        session.ask(_ADD_FLOWS, (version, *columns(new)))


def save_standings(session: Session, turns: Turns) -> None:
    """Write the settings and costs that changed; what is as by default needs no row."""
    plain = []
    for customer in turns.adjusted:
        standing = turns.standings[customer]
        if _values(standing) == _values(Standing(customer)):
            plain.append(customer)
        else:
            weight, limit, paused, costs = _values(standing)
            session.ask(_SAVE_STANDING, (customer, weight, limit, paused, list(costs)))
    if plain:
        session.ask(_DROP_STANDINGS, (plain,))


def _values(standing: Standing) -> tuple[int, int | None, bool, tuple[int, ...]]:
    return standing.weight, standing.limit, standing.paused, standing.recent_costs
