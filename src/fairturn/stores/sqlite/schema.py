"""The schema of an SQLite file: which files are accepted, and how they are migrated."""

from pathlib import Path

import apsw

from fairturn.errors import StoreRefused
from fairturn.stores import crash
from fairturn.stores.migrations import BASELINE, Migration, migrations_of, refuse_unreadable

APPLICATION_ID = 0x46544E31  # "FTN1", in the header of the file
# The header of a database file: its first bytes, and the offsets of two numbers.
_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES, _COOKIE_AT, _VERSION_AT, _APPLICATION_AT = 100, 40, 60, 68
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "fuse", "afs", "ceph")

_READABLE_FROM = "SELECT readable_from FROM migrations WHERE number = ?"
_APPLIED = "INSERT INTO migrations (number, readable_from) VALUES (?, ?)"


def migrations() -> list[Migration]:
    """Return the migrations from an empty file to the schema of this release."""
    return migrations_of("fairturn.stores.sqlite")


def newest_version() -> int:
    """Return the schema version of this release."""
    return migrations()[-1].number


def migrate(connection: apsw.Connection, name: str) -> None:
    """Migrate the file to the schema of this release, in a transaction for each migration. Raise
    `StoreRefused` for a schema that this release cannot use."""
    connection.execute("BEGIN")  # one snapshot: another process may be migrating now
    try:
        version = version_of(connection, name)
    finally:
        connection.execute("COMMIT")
    for number, readable_from, script in migrations():
        if version >= number:
            continue
        connection.execute("BEGIN IMMEDIATE")
        try:
            if version_of(connection, name) < number:
                connection.execute(script)
                connection.execute(_APPLIED, (number, readable_from))
                connection.execute(f"PRAGMA user_version = {number}")
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                crash.point("migrate-before-commit")
            connection.execute("COMMIT")
            crash.point("migrate-after-commit")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def version_of(connection: apsw.Connection, name: str) -> int:
    """Return the schema version of a file, 0 if it is empty. Raise `StoreRefused` for a database of
    another program, and for a schema that this release cannot use."""
    version = foreign_version_of(connection, name)
    readable_from = version
    if version > newest_version():
        readable_from = connection.execute(_READABLE_FROM, (version,)).get or version
    refuse_unreadable(name, version, readable_from, newest_version())
    return version


def foreign_version_of(connection: apsw.Connection, name: str) -> int:
    """Return the schema version of a file of any release, 0 if it is empty."""
    version = int(connection.pragma("user_version"))
    application = int(connection.pragma("application_id"))
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").get
    if application != APPLICATION_ID and (tables or application or version):
        raise StoreRefused(f"{name} is a database of another program; it was left untouched")
    return version


def refuse_engine(version: str) -> None:
    """Raise `StoreRefused` for an SQLite with the WAL-reset bug, which loses committed writes if a
    commit and a checkpoint overlap: 3.7.0 to 3.51.2, except from 3.50.7 and from 3.44.6 on."""
    number = tuple(int(part) for part in version.split(".")[:3])
    if number >= (3, 51, 3) or number < (3, 7, 0):
        return
    if number[:2] in ((3, 50), (3, 44)) and number >= {50: (3, 50, 7), 44: (3, 44, 6)}[number[1]]:
        return
    raise StoreRefused(
        f"SQLite {version} can lose committed writes (the WAL-reset bug); "
        "install a newer apsw: python -m pip install -U apsw"
    )


def refuse_foreign_file(path: Path, *, any_version: bool = False) -> None:
    """Raise `StoreRefused` for a file that is not a queue and, unless `any_version`, for a queue of
    0.1, without opening it as a database, which would write to some files."""
    if not path.parent.is_dir():
        raise StoreRefused(f"the folder {path.parent} does not exist; make it first")
    if path.is_dir():
        raise StoreRefused(f"{path} is a folder, not a database")
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreRefused(f"{path} cannot be read: {error.strerror}") from error
    if not header:
        return
    page_bytes = int.from_bytes(header[16:18], "big")
    if header[:16] != _MAGIC or page_bytes & (page_bytes - 1) or len(header) < _HEADER_BYTES:
        raise StoreRefused(f"{path} is not a database; it was left untouched")
    schema_cookie, version, application = (
        int.from_bytes(header[at : at + 4], "big")
        for at in (_COOKIE_AT, _VERSION_AT, _APPLICATION_AT)
    )
    if application != APPLICATION_ID and (application or schema_cookie):
        raise StoreRefused(f"{path} is a database of another program; it was left untouched")
    if version < BASELINE and not any_version:
        refuse_unreadable(str(path), version, version, BASELINE)


def refuse_network(path: Path, network: str | None, *, allowed: bool) -> None:
    """Raise `StoreRefused` for a path on a network file system, unless that is allowed."""
    if network and not allowed:
        raise StoreRefused(
            f"{path} is on a {network} file system, where SQLite's locks are not "
            "reliable; use a local disk, or PostgreSQL for several machines "
            "(allow_network=True accepts the risk, and is slower)"
        )


def network_below(path: Path) -> str | None:
    """Return the type of a path's network or virtual file system; None: local or unknown."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    parent = str(path.parent.resolve())
    best, kind = "", ""
    for line in mounts:
        left, _, right = line.partition(" - ")
        mount = left.split()[4].replace("\\040", " ")
        if (parent + "/").startswith(mount.rstrip("/") + "/") and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind if kind.split(".")[0] in _NETWORK else None
