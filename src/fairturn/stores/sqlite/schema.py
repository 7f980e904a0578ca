"""The schema of an SQLite file: its numbered migrations, and how they are applied."""

import re
from importlib import resources

import apsw

from fairturn import crash
from fairturn.errors import StoreRefused

APPLICATION_ID = 0x46544E31  # "FTN1", in the header of the file


def migrations() -> list[tuple[int, str]]:
    """The numbered steps from an empty file to this version's schema."""
    folder = resources.files("fairturn.stores.sqlite") / "migrations"
    steps = []
    for entry in folder.iterdir():
        match = re.fullmatch(r"(\d{4})_\w+\.sql", entry.name)
        if match:
            steps.append((int(match[1]), entry.read_text(encoding="utf-8")))
    return sorted(steps)


def migrate(connection: apsw.Connection, name: str) -> None:
    """Bring the file to this version's schema, one transaction a step; refuse a newer one."""
    steps = migrations()
    newest = steps[-1][0]
    connection.execute("BEGIN")  # one snapshot: another process may be making this schema now
    try:
        version = version_of(connection, name, newest)
    finally:
        connection.execute("COMMIT")
    for number, script in steps if version < newest else ():
        connection.execute("BEGIN IMMEDIATE")
        try:
            if version_of(connection, name, newest) < number:
                connection.execute(script)
                connection.execute(f"PRAGMA user_version = {number}")
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                crash.point("migrate-before-commit")
            connection.execute("COMMIT")
            crash.point("migrate-after-commit")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def version_of(connection: apsw.Connection, name: str, newest: int) -> int:
    """The version of a file's schema, 0 if it is empty; refuse what this fairturn does not know."""
    version = int(connection.pragma("user_version"))
    application = int(connection.pragma("application_id"))
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").get
    if application != APPLICATION_ID and (tables or application or version):
        raise StoreRefused(f"{name} is a database of another program; it was left untouched")
    if version > newest:
        raise StoreRefused(
            f"{name} has schema {version} and this fairturn knows schemas up to {newest}; "
            "install the newer fairturn that made it (the file was left untouched)"
        )
    return version
