"""The schema of a queue: numbered migrations, each in a transaction, one process at a time.

Migrations change the tables. Each function has one definition, which the last migration installs
(decision 0021).
"""

from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import psycopg
from psycopg import sql

from fairturn.clock import SERVER_NOW
from fairturn.errors import KindRefused, NoQueue, StoreRefused, StoreUnavailable
from fairturn.explain.snapshot import WORKERS_KEPT_US
from fairturn.model import (
    ATTEMPTS_STORED_MAX,
    CANCELS_KEPT_MAX,
    CANCELS_REPORTED_MAX,
    CHILDREN_UNCHECKED_MAX,
    DEFAULT_KIND_NAME,
    DOCUMENT_BYTES,
    ENDED,
    EXPIRE_MAX,
    FAILED,
    KEY_KEPT_US,
    KINDS_MAX,
    LEASE_EXPIRED,
    LEASE_US_MAX,
    REAL_COST_MAX,
    SNOOZES_MAX,
    STEPS_MAX,
    AttemptOutcome,
    KindPolicy,
    Settings,
)
from fairturn.priority import CLOCK_AHEAD_US_MAX, LEVELS
from fairturn.scheduling import outages
from fairturn.scheduling.flows import COST_ONE, DEFAULT_KIND, WEIGHT_MAX, WEIGHT_MIN, WEIGHT_ONE
from fairturn.stores import crash
from fairturn.stores.admission import refuse_kind_beyond_max, refuse_unknown_kind
from fairturn.stores.migrations import Migration, migrations_of, refuse_unreadable
from fairturn.stores.postgres.claim import (
    PROBE_EVERY_IDLE_US,
    PROBE_EVERY_US,
    PROBE_FLOWS_MAX,
    PROBE_SIZE,
)
from fairturn.stores.postgres.connection import (
    LOCK_TIMEOUT,
    SETTINGS_LOCK_TIMEOUT,
    SUBMIT_LOCK_TIMEOUT,
    PostgresDatabase,
)
from fairturn.stores.postgres.rows import MAY_EXPIRE, NO_ORDER
from fairturn.stores.transitions import SNOOZED_TOO_OFTEN, TOO_MANY_STEPS
from fairturn.stores.urls import SCHEMA
from fairturn.stores.values import (
    ADVANCED,
    ATTEMPT_OUTCOMES,
    CODES,
    JUMP_MIN,
    STORED_BYTES,
    codes_of,
)

# Held while a migration is applied: of ten processes that start at once, one applies it.
_LOCK = "SELECT pg_advisory_xact_lock(hashtext('{schema}.'), 4)"
_VERSION = "SELECT coalesce(max(number), 0) FROM {schema}.migrations"
_EXISTS = "SELECT to_regclass('{schema}.migrations') IS NOT NULL"
_CREATE_SCHEMA = "CREATE SCHEMA IF NOT EXISTS {schema}"
_HAS_SCHEMA = "SELECT to_regnamespace('{schema}') IS NOT NULL"
_CREATE_MIGRATIONS = """
    CREATE TABLE {schema}.migrations (
        number integer PRIMARY KEY, readable_from integer NOT NULL)"""
# A migration that waits for a table lock blocks all later statements on the table; no claim holds
# a lock for this long.
_LOCK_TIMEOUT_S = 5
# GRANT by a role that may not grant is only a warning of the server.
_GRANTED = """
    SELECT has_schema_privilege({role}, '{schema}', 'USAGE')
        AND has_table_privilege({role}, '{schema}.documents', 'INSERT')"""
_HAS_ROLE = "SELECT 1 FROM pg_roles WHERE rolname = %s"
# A release that could not use an earlier schema cannot use this one either.
_APPLIED = """
    INSERT INTO {schema}.migrations (number, readable_from)
    SELECT %s, greatest(%s, max(readable_from)) FROM {schema}.migrations"""
_READABLE_FROM = "SELECT readable_from FROM {schema}.migrations ORDER BY number DESC LIMIT 1"

# The privileges of a role that uses a queue and does not migrate it.
_GRANTS = """
    GRANT USAGE ON SCHEMA {schema} TO {role};
    GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role};
    REVOKE INSERT, UPDATE, DELETE ON {schema}.migrations FROM {role};
    GRANT UPDATE (readable_from) ON {schema}.migrations TO {role};
    GRANT USAGE, SELECT, UPDATE ON ALL SEQUENCES IN SCHEMA {schema} TO {role};
    GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO {role}"""


_SCHEMA_OF_KINDS = 14  # the first schema whose release knows kinds of work
_SCHEMA_OF_STEPS = 15  # the same of pipelines, expiry and outages
# Virtual times end at 2^63; one claim adds less than 2^57.
_CLOCK_MAX = 1 << 60
# Each statement of a function has one good plan: nested loops over indexes. With statistics from
# when a table was small, the planner would choose plans that read all of it, dead rows included.
# JIT is off because servers before 18 cost disabled plans so high that they compile them, which
# takes longer than a hundred claims.
_PLANNED_BY_INDEXES = """\
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan SET jit = off"""


def _refusal(refuse: Callable[[str], None]) -> str:
    """Return the message for a kind that is refused, as a format of SQL for its name."""
    try:
        refuse("%1$s")
    except KindRefused as refused:
        return _literal(str(refused))
    raise AssertionError("the kind was not refused")


def _literal(text: str) -> str:
    escaped = text.replace("'", "''")
    return f"'{escaped}'"


# Placeholders of the SQL functions. States appear there only by these names.
_CONSTANTS = {
    "planned_by_indexes": _PLANNED_BY_INDEXES,
    "now": SERVER_NOW,
    "cost_one": COST_ONE,
    "weight_one": WEIGHT_ONE,
    "weight_min": WEIGHT_MIN,
    "weight_max": WEIGHT_MAX,
    "clock_max": _CLOCK_MAX,
    "no_order": NO_ORDER,
    "default_kind": DEFAULT_KIND,
    "default_kind_name": DEFAULT_KIND_NAME,
    "kinds_max": KINDS_MAX,
    "schema_of_kinds": _SCHEMA_OF_KINDS,
    "schema_of_steps": _SCHEMA_OF_STEPS,
    "unknown_kind": _refusal(lambda name: refuse_unknown_kind(name, Settings())),
    "too_many_kinds": _refusal(lambda name: refuse_kind_beyond_max(name, KINDS_MAX)),
    "open_kinds": KindPolicy.OPEN.value,
    "steps_max": STEPS_MAX,
    "too_many_steps": _literal(TOO_MANY_STEPS),
    "snoozes_max": SNOOZES_MAX,
    "snoozed_too_often": _literal(SNOOZED_TOO_OFTEN),
    "attempts_stored_max": ATTEMPTS_STORED_MAX,
    "attempt_failed": ATTEMPT_OUTCOMES.index(AttemptOutcome.FAILED),
    "attempt_lost": ATTEMPT_OUTCOMES.index(AttemptOutcome.LOST),
    "advanced": ADVANCED,
    "document_bytes": DOCUMENT_BYTES,
    "stored_bytes": STORED_BYTES,
    "bytes_per_customer_max": Settings().bytes_per_customer_max,
    "key_kept": KEY_KEPT_US,
    "workers_kept": WORKERS_KEPT_US,
    "clock_ahead_max": CLOCK_AHEAD_US_MAX,
    "children_unchecked_max": CHILDREN_UNCHECKED_MAX,
    "real_cost_max": REAL_COST_MAX,
    "cancels_kept_max": CANCELS_KEPT_MAX,
    "cancels_reported_max": CANCELS_REPORTED_MAX,
    "lease_max": LEASE_US_MAX,
    "lease_expired": LEASE_EXPIRED,
    "epoch_jump_min": JUMP_MIN,
    "day": 24 * 3_600 * 1_000_000,
    "page": 100,  # flows that a claim reads in one statement
    "probe_size": PROBE_SIZE,
    "probe_flows_max": PROBE_FLOWS_MAX,
    "probe_every": PROBE_EVERY_US,
    "probe_every_idle": PROBE_EVERY_IDLE_US,
    "expire_max": EXPIRE_MAX,
    "may_expire": MAY_EXPIRE,
    "reports_within": outages.REPORTS_WITHIN_US,
    "probes_free": outages.PROBES_FREE,
    "probe_min": outages.PROBE_US_MIN,
    "probe_max": outages.PROBE_US_MAX,
    "probe_growth_max": outages.PROBE_GROWTH_MAX,
    "retry_after_max": outages.RETRY_AFTER_US_MAX,
    "resume": outages.RESUME_US,
    "resume_step": outages.RESUME_STEP_US,
    "of_kind": outages.OF_KIND,
    "lock_timeout": LOCK_TIMEOUT,
    "submit_lock_timeout": SUBMIT_LOCK_TIMEOUT,
    "settings_lock_timeout": SETTINGS_LOCK_TIMEOUT,
    "ended_states": codes_of(ENDED),
    "failed_states": codes_of(FAILED),
    "count_each_priority": ", ".join(
        f"count(*) FILTER (WHERE p = {n})" for n in range(1, LEVELS + 1)
    ),
    "count_failed": ", ".join(
        f"{state} = e.{state} + cardinality(array_positions(ended, {CODES[state]}::smallint))"
        for state in FAILED
    ),
    **{state.value: code for state, code in CODES.items()},
}


# A function may call those that are created after it.
_IN_ANY_ORDER = "SET LOCAL check_function_bodies = off;"


def migrations() -> list[Migration]:
    """Return the migrations from an empty database to the schema of this release. The last one also
    installs the functions: a change of a function needs a migration, even an empty one."""
    *earlier, last = migrations_of("fairturn.stores.postgres")
    scripts = [script for _, script in function_scripts()]
    functions = "\n".join([last.script, _IN_ANY_ORDER, *scripts])
    return [*earlier, last._replace(script=functions)]


def function_scripts() -> list[tuple[str, str]]:
    """Return the names and texts of the scripts that define the functions, sorted."""
    entries = (resources.files("fairturn.stores.postgres") / "functions").iterdir()
    return sorted((e.name, e.read_text("utf-8")) for e in entries if e.name.endswith(".sql"))


def filled_in(script: str, schema: str) -> str:
    """Return a script with the name of the schema and the constants filled in."""
    return script.format(schema=schema, **_CONSTANTS)


def newest() -> int:
    """Return the schema version of this release."""
    return migrations()[-1].number


def version_of(connection: psycopg.Connection[Any], schema: str) -> int:
    """Return the version of a schema created by any release, or 0 if none has created it."""
    if not _one(connection, _EXISTS.format(schema=schema)):
        return 0
    version: int = _one(connection, _VERSION.format(schema=schema))
    return version


def refuse_other(
    connection: psycopg.Connection[Any], database: PostgresDatabase, *, migrates: bool
) -> int:
    """Return the version of the schema. Raise `NoQueue` or `StoreRefused` for one that this release
    can neither use nor, if it `migrates`, migrate."""
    name, schema, known = database.name, database.schema, newest()
    version = version_of(connection, schema)
    if version == 0 and not migrates:
        raise NoQueue(
            f"{name} has no queue in its schema {schema}; create it with: fairturn migrate"
        )
    readable_from = version
    if version > known:
        readable_from = _one(connection, _READABLE_FROM.format(schema=schema))
    refuse_unreadable(name, version, readable_from, known)
    if version < known and not migrates:
        raise StoreRefused(
            f"{name} has schema {version} and this release needs schema {known}; "
            "run: fairturn migrate"
        )
    return version


def migrate(
    connection: psycopg.Connection[Any],
    name: str,
    schema: str,
    steps: Sequence[Migration] | None = None,
) -> list[int]:
    """Apply all missing migrations, or those among `steps`; return their numbers."""
    applied = []
    for number, readable_from, script in migrations() if steps is None else steps:
        if version_of(connection, schema) >= number:
            continue
        with connection.transaction():
            connection.execute(_LOCK.format(schema=schema))
            if not _one(connection, _HAS_SCHEMA.format(schema=schema)):
                connection.execute(_CREATE_SCHEMA.format(schema=schema))
            if not _one(connection, _EXISTS.format(schema=schema)):
                connection.execute(_CREATE_MIGRATIONS.format(schema=schema))
            if version_of(connection, schema) < number:
                connection.execute(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT_S}s'")
                try:
                    connection.execute(filled_in(script, schema))
                except psycopg.errors.LockNotAvailable as error:
                    raise StoreUnavailable(
                        f"migration {number} of {name} is blocked by a long-running transaction "
                        "(pg_dump?); nothing was changed; try again when it has ended"
                    ) from error
                connection.execute(_APPLIED.format(schema=schema), (number, readable_from))
                applied.append(number)
                crash.point("migrate-before-commit")
        if applied:
            crash.point("migrate-after-commit")
    return applied


def refuse_absent_role(connection: psycopg.Connection[Any], name: str, role: str) -> None:
    """Raise `StoreRefused` if the role does not exist."""
    if not connection.execute(_HAS_ROLE, (role,)).fetchall():
        raise StoreRefused(
            f"{name} has no role {role!r}; create it with: createuser {role} (nothing was changed)"
        )


def grant(connection: psycopg.Connection[Any], schema: str, role: str) -> None:
    """Grant a role the use of the queue, without the right to change its schema."""
    identifier = sql.Identifier(role).as_string(connection)
    connection.execute(_GRANTS.format(schema=schema, role=identifier))
    literal = sql.Literal(role).as_string(connection)
    if not _one(connection, _GRANTED.format(schema=schema, role=literal)):
        raise psycopg.errors.InsufficientPrivilege(f"no privileges were granted to {role}")


def migrate_server(url: str, *, schema: str = SCHEMA, grant_to: str | None = None) -> list[int]:
    """Migrate the queue at a URL, and grant a role its use; return the applied migrations."""
    database = PostgresDatabase(url, schema=schema, pool_max=1, prepare=False)
    try:
        with database.connect() as connection:
            if grant_to is not None:
                refuse_absent_role(connection, database.name, grant_to)
            refuse_other(connection, database, migrates=True)
            applied = migrate(connection, database.name, schema)
            if grant_to is not None:
                grant(connection, schema, grant_to)
            return applied
    except psycopg.errors.InsufficientPrivilege as error:
        raise StoreRefused(
            f"the role {database.role} may not create or change the schema {schema} in "
            f"{database.name}, or grant its use ({error.diag.message_primary or error}); "
            "migrate with the role that owns it"
        ) from error
    except psycopg.Error as error:
        raise database.translate(error) from error
    finally:
        database.close()


def migrate_on_opening(connection: psycopg.Connection[Any], database: PostgresDatabase) -> None:
    """Apply all missing migrations. Raise `StoreRefused` if the role may not."""
    try:
        migrate(connection, database.name, database.schema)
    except psycopg.errors.InsufficientPrivilege as error:
        role = database.role
        raise StoreRefused(
            f"{database.name} needs schema {newest()}, and the role {role} may not migrate it "
            f"({error.diag.message_primary}); as the owner, run: fairturn migrate --grant {role}"
        ) from error


def _one(connection: psycopg.Connection[Any], statement: str) -> Any:
    ((value,),) = connection.execute(statement).fetchall()
    return value
