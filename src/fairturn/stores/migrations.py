"""Numbered migrations of both databases (decision 0030).

A migration is a script `NNNN_title.sql` in the folder `migrations` of a store. Its first line is a
comment, `-- readable from N`: the oldest schema version whose release still works after this
migration. A migration that only adds tables and columns is readable from the previous version, so
that processes of the previous release can restart during a rollout. A later release drops what no
release uses any more.

Schema 10 is the baseline of fairturn 0.2. `fairturn copy` converts the last schemas of 0.1.
"""

import re
from importlib import resources
from typing import NamedTuple

from fairturn.errors import StoreRefused

BASELINE = 10
_FILE_NAME = re.compile(r"(\d{4})_\w+\.sql")
_READABLE_FROM = re.compile(r"-- readable from (\d+)\n")


class Migration(NamedTuple):
    """A script that migrates to schema version `number`."""

    number: int
    readable_from: int
    script: str


def migrations_of(package: str) -> list[Migration]:
    """Return the migrations of a store in order."""
    found = []
    for entry in (resources.files(package) / "migrations").iterdir():
        name = _FILE_NAME.fullmatch(entry.name)
        if name:
            script = entry.read_text(encoding="utf-8")
            header = _READABLE_FROM.match(script)
            assert header is not None, f"{entry.name} does not begin with '-- readable from N'"
            found.append(Migration(int(name[1]), int(header[1]), script))
    return sorted(found)


def refuse_unreadable(name: str, version: int, readable_from: int, newest: int) -> None:
    """Raise `StoreRefused` for a schema that this release can neither use nor migrate. Version 0
    is an empty database."""
    if 0 < version < BASELINE:
        raise StoreRefused(
            f"{name} has schema {version}, of fairturn 0.1; copy it into a new queue with: "
            "fairturn copy OLD NEW (nothing was changed)"
        )
    if version > newest and readable_from > newest:
        raise StoreRefused(
            f"{name} has schema {version}, and this release reads schemas up to {newest}; "
            "install the newer fairturn that migrated it (nothing was changed)"
        )
