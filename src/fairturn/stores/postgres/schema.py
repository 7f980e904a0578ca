"""The schema of a queue: numbered steps, each in a transaction, one process at a time.

Tables are what the steps have made of them. Functions stand once, as they are now, and come with
the last step.
"""

import re
from importlib import resources
from typing import Any

import psycopg
from psycopg import sql

from fairturn import crash
from fairturn.clock import SERVER_NOW
from fairturn.errors import NoQueue, StoreRefused, StoreUnavailable
from fairturn.explain.snapshot import WORKERS_KEPT_US
from fairturn.model import (
    CANCELS_KEPT_MAX,
    CANCELS_REPORTED_MAX,
    CHILDREN_UNCHECKED_MAX,
    ENDED,
    FAILED,
    KEY_KEPT_US,
    LEASE_RAN_OUT,
    LEASE_US_MAX,
    REAL_COST_MAX,
)
from fairturn.priority import CLOCK_AHEAD_US_MAX
from fairturn.scheduling.flows import COST_ONE, WEIGHT_MAX, WEIGHT_MIN, WEIGHT_ONE
from fairturn.stores.epoch import JUMP_MIN
from fairturn.stores.postgres.claim import PROBE_EVERY_IDLE_US, PROBE_EVERY_US, PROBE_SIZE
from fairturn.stores.postgres.connection import (
    LOCK_TIMEOUT,
    SETTINGS_LOCK_TIMEOUT,
    SUBMIT_LOCK_TIMEOUT,
    Database,
)
from fairturn.stores.postgres.rows import NO_ORDER
from fairturn.stores.postgres.session import SCHEMA
from fairturn.stores.values import CODES

# Only while a step is made, so that ten processes that start at once make it once.
_LOCK = "SELECT pg_advisory_xact_lock(hashtext('{schema}.'), 4)"
_VERSION = "SELECT coalesce(max(number), 0) FROM {schema}.migrations"
_EXISTS = "SELECT to_regclass('{schema}.migrations') IS NOT NULL"
_MAKE_SCHEMA = "CREATE SCHEMA IF NOT EXISTS {schema}"
_HAS_SCHEMA = "SELECT to_regnamespace('{schema}') IS NOT NULL"
_MAKE_MIGRATIONS = "CREATE TABLE {schema}.migrations (number integer PRIMARY KEY)"
# Whoever waits for a table lets all others wait behind it: no claim holds one for so long.
_GIVE_UP_S = 5
# Whoever may not give rights is only warned of it by the server.
_GRANTED = """
    SELECT has_schema_privilege({role}, '{schema}', 'USAGE')
        AND has_table_privilege({role}, '{schema}.documents', 'INSERT')"""
_HAS_ROLE = "SELECT 1 FROM pg_roles WHERE rolname = %s"
_NOTE = "INSERT INTO {schema}.migrations (number) VALUES (%s)"

# What a role needs that only uses a queue.
_GRANTS = """
    GRANT USAGE ON SCHEMA {schema} TO {role};
    GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role};
    REVOKE INSERT, UPDATE, DELETE ON {schema}.migrations FROM {role};
    GRANT USAGE, SELECT, UPDATE ON ALL SEQUENCES IN SCHEMA {schema} TO {role};
    GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO {role}"""


# Virtual times end at 2^63; one claim adds less than 2^57.
_CLOCK_MAX = 1 << 60
# Every statement of a function has one right plan, by its indexes in loops. Statistics of a table
# that was small when it was analysed would lead to plans that read all of it, dead rows included.
# A server before 18 would compile a plan that is forced, which takes longer than a hundred claims.
_PLANNED_BY_INDEXES = """\
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan SET jit = off"""
# Names of Python in the functions of the schema. Every state and list of states comes from here.
_CONSTANTS = {
    "planned_by_indexes": _PLANNED_BY_INDEXES,
    "now": SERVER_NOW,
    "cost_one": COST_ONE,
    "weight_one": WEIGHT_ONE,
    "weight_min": WEIGHT_MIN,
    "weight_max": WEIGHT_MAX,
    "clock_max": _CLOCK_MAX,
    "no_order": NO_ORDER,
    "key_kept": KEY_KEPT_US,
    "workers_kept": WORKERS_KEPT_US,
    "clock_ahead_max": CLOCK_AHEAD_US_MAX,
    "children_unchecked_max": CHILDREN_UNCHECKED_MAX,
    "real_cost_max": REAL_COST_MAX,
    "cancels_kept_max": CANCELS_KEPT_MAX,
    "cancels_reported_max": CANCELS_REPORTED_MAX,
    "lease_max": LEASE_US_MAX,
    "lease_ran_out": LEASE_RAN_OUT,
    "epoch_jump_min": JUMP_MIN,
    "day": 24 * 3_600 * 1_000_000,
    "page": 100,  # flows that a claim reads at a time
    "probe_size": PROBE_SIZE,
    "probe_every": PROBE_EVERY_US,
    "probe_every_idle": PROBE_EVERY_IDLE_US,
    "lock_timeout": LOCK_TIMEOUT,
    "submit_lock_timeout": SUBMIT_LOCK_TIMEOUT,
    "settings_lock_timeout": SETTINGS_LOCK_TIMEOUT,
    "ended_states": ", ".join(str(CODES[state]) for state in ENDED),
    "failed_states": ", ".join(str(CODES[state]) for state in FAILED),
    **{state.value: code for state, code in CODES.items()},
}


def migrations() -> list[tuple[int, str]]:
    """The numbered steps from an empty database to this version's schema. The last one brings the
    functions: who changes one of them adds a step, even if there is nothing else in it."""
    steps = []
    for name, script in scripts("migrations"):
        match = re.fullmatch(r"(\d{4})_\w+\.sql", name)
        if match:
            steps.append((int(match[1]), script))
    number, last = steps[-1]
    steps[-1] = (number, "\n".join([last, *(script for _, script in scripts("functions"))]))
    return steps


def scripts(folder: str) -> list[tuple[str, str]]:
    """The scripts in a folder of this package, by their names."""
    entries = (resources.files("fairturn.stores.postgres") / folder).iterdir()
    return sorted((e.name, e.read_text("utf-8")) for e in entries if e.name.endswith(".sql"))


def filled_in(script: str, schema: str) -> str:
    """A step as the server executes it."""
    return script.format(schema=schema, **_CONSTANTS)


def newest() -> int:
    """The version of the schema that this fairturn makes."""
    return migrations()[-1][0]


def version_of(connection: psycopg.Connection[Any], schema: str) -> int:
    """The version of a schema; 0 if there is none."""
    if not _one(connection, _EXISTS.format(schema=schema)):
        return 0
    version: int = _one(connection, _VERSION.format(schema=schema))
    return version


def refuse_other(version: int, name: str, schema: str) -> None:
    """Refuse a schema that is not there, or that this fairturn does not know."""
    known = newest()
    if version == 0:
        raise NoQueue(f"{name} has no queue in its schema {schema}; make it with: fairturn migrate")
    if version < known:
        raise StoreRefused(
            f"{name} has schema {version} and this fairturn needs schema {known}; "
            "bring it up with: fairturn migrate"
        )
    refuse_newer(version, name)


def refuse_newer(version: int, name: str) -> None:
    """Refuse a schema that a newer fairturn has made."""
    if version > newest():
        raise StoreRefused(
            f"{name} has schema {version} and this fairturn knows schemas up to {newest()}; "
            "install the newer fairturn that made it (nothing was changed)"
        )


def migrate(connection: psycopg.Connection[Any], name: str, schema: str) -> list[int]:
    """Bring a database to this version's schema; the numbers of the steps that were made."""
    made = []
    for number, script in migrations():
        if version_of(connection, schema) >= number:
            continue
        with connection.transaction():
            connection.execute(_LOCK.format(schema=schema))
            if not _one(connection, _HAS_SCHEMA.format(schema=schema)):
                connection.execute(_MAKE_SCHEMA.format(schema=schema))
            if not _one(connection, _EXISTS.format(schema=schema)):
                connection.execute(_MAKE_MIGRATIONS.format(schema=schema))
            if version_of(connection, schema) < number:
                connection.execute(f"SET LOCAL lock_timeout = '{_GIVE_UP_S}s'")
                try:
                    connection.execute(filled_in(script, schema))
                except psycopg.errors.LockNotAvailable as error:
                    raise StoreUnavailable(
                        f"somebody uses {name} in a transaction that lasts, a dump perhaps, and "
                        f"schema {number} cannot be made beside it; try again when it is over"
                    ) from error
                connection.execute(_NOTE.format(schema=schema), (number,))
                made.append(number)
                crash.point("migrate-before-commit")
        if made:
            crash.point("migrate-after-commit")
    refuse_newer(version_of(connection, schema), name)
    return made


def refuse_absent_role(connection: psycopg.Connection[Any], name: str, role: str) -> None:
    """Refuse to give rights to somebody who is not there, before anything is made."""
    if not connection.execute(_HAS_ROLE, (role,)).fetchall():
        raise StoreRefused(
            f"{name} knows no role {role!r}; make it with: createuser {role} (nothing was changed)"
        )


def grant(connection: psycopg.Connection[Any], schema: str, role: str) -> None:
    """Let a role use the queue, without the right to change its schema."""
    named = sql.Identifier(role).as_string(connection)
    connection.execute(_GRANTS.format(schema=schema, role=named))
    literal = sql.Literal(role).as_string(connection)
    if not _one(connection, _GRANTED.format(schema=schema, role=literal)):
        raise psycopg.errors.InsufficientPrivilege(f"no rights were given to {role}")


def migrate_server(url: str, *, schema: str = SCHEMA, grant_to: str | None = None) -> list[int]:
    """Bring the queue at an address to this version's schema, and let a role use it."""
    database = Database(url, schema=schema, pool_max=1, prepare=False)
    try:
        with database.connect() as connection:
            if grant_to is not None:
                refuse_absent_role(connection, database.name, grant_to)
            made = migrate(connection, database.name, schema)
            if grant_to is not None:
                grant(connection, schema, grant_to)
            return made
    except psycopg.errors.InsufficientPrivilege as error:
        raise StoreRefused(
            f"the role {database.role} may not make or change the schema {schema} in "
            f"{database.name}, or give rights on it ({error.diag.message_primary or error}); "
            "migrate with the role that owns it"
        ) from error
    except psycopg.Error as error:
        raise database.translate(error) from error
    finally:
        database.close()


def migrate_on_opening(connection: psycopg.Connection[Any], database: Database) -> None:
    """Bring the schema up, if the role may."""
    try:
        migrate(connection, database.name, database.schema)
    except psycopg.errors.InsufficientPrivilege as error:
        role = database.role
        raise StoreRefused(
            f"{database.name} has not the schema {newest()} that this fairturn needs, and the role "
            f"{role} may not make it ({error.diag.message_primary}); its owner does, with: "
            f"fairturn migrate --grant {role}"
        ) from error


def _one(connection: psycopg.Connection[Any], statement: str) -> Any:
    ((value,),) = connection.execute(statement).fetchall()
    return value
