"""Whether a claim may find anything: asked in its first round trip, before the lock is taken.

A hint wakes every worker that has nothing to do. If each of them took the lock of claims in order
to see that another one was faster, those who do have something to do would wait for all of them.
"""

from fairturn.clock import SERVER_NOW, SERVER_WAITED
from fairturn.stores.postgres.expiring import FIRST_DELAY_ENDS, FIRST_LEASE_ENDS
from fairturn.stores.postgres.rows import UNSEEN, UNSEEN_LATE
from fairturn.stores.postgres.session import PLAN_BY_INDEXES

_MOMENT = f"coalesce(%(moment)s::bigint, {SERVER_NOW})"
_LEASES_AT = f"coalesce(%(leases_at)s::bigint, {SERVER_NOW})"
# How many documents wait: few rows of each, as in a summary.
_WAITING = """
    (SELECT sum(n) FROM fairturn.totals t, unnest(t.arrived) n)
    - (SELECT sum(n) FROM unnest(
        (SELECT taken FROM fairturn.turns ORDER BY version DESC LIMIT 1)) n)
    + (SELECT coalesce(sum(waiting), 0) FROM fairturn.moved)"""
# Whether there are flows that wait and are not held: they have weights.
_ANY_ACTIVE = "(SELECT 0 < ANY (weights) FROM fairturn.turns ORDER BY version DESC LIMIT 1)"
# By the indexes of each. What arrived is to be claimed at once. What else was recorded, above all
# the outcomes of others, makes room only for documents that wait; while none does it can wait
# itself, for a claim that is `thorough`.
_ANYTHING = f"""
    EXISTS (SELECT 1 FROM fairturn.recorded WHERE {UNSEEN} AND heads IS NOT NULL)
        OR EXISTS (SELECT 1 FROM fairturn.recorded WHERE {UNSEEN_LATE} AND heads IS NOT NULL)
        OR (%(thorough)s OR {_WAITING} > 0)
            AND ({_ANY_ACTIVE}
                OR EXISTS (SELECT 1 FROM fairturn.recorded WHERE {UNSEEN})
                OR EXISTS (SELECT 1 FROM fairturn.recorded WHERE {UNSEEN_LATE})
                OR EXISTS (SELECT 1 FROM fairturn.moved))
        OR {FIRST_LEASE_ENDS} <= {_LEASES_AT}
        OR {FIRST_DELAY_ENDS} <= {_MOMENT}"""
# It is `rows.LOCK_QUEUE`, with nulls in the place of the queue's row if the lock was not taken. For
# the statements behind it in the same packet it leaves word whether it was.
LOCK_IF_ANYTHING = f"""
    WITH locked AS MATERIALIZED (
        SELECT settings, settings_version, id_key FROM fairturn.queue
        WHERE {_ANYTHING} FOR NO KEY UPDATE)
    SELECT l.settings, l.settings_version, l.id_key, {_MOMENT}, {SERVER_WAITED}, {PLAN_BY_INDEXES},
        set_config('fairturn.locked', (l.id_key IS NOT NULL)::text, true)
    FROM (VALUES (1)) always LEFT JOIN locked l ON true"""
IS_LOCKED = "current_setting('fairturn.locked', true) = 'true'"
