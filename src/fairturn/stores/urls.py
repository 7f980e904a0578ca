"""URLs of databases: detection, and display without passwords."""

import re

SCHEMA = "fairturn"  # of a queue in PostgreSQL, by default
POSTGRES = ("postgresql", "postgres")
# Also matches mistyped PostgreSQL URLs (a missing slash or colon) and key=value DSNs: used as a
# file name, one would write its password into a directory.
_ADDRESS = re.compile(
    r"\s*(?:(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://"
    r"|(?i:postgres(?:ql)?)(?::|//)"
    r"|(?:\w+\s*=\s*\S+\s+)*(?:host|hostaddr|dbname|password|service)\s*=)"
)
_PASSWORD = re.compile(r"^(\s*[A-Za-z0-9+.-]+(?::/*|//)[^:@/?#]*):.*@")
_PASSWORD_BY_NAME = re.compile(r"((?:ssl)?password\s*=\s*)(?:'[^']*'|[^&#\s]*)")


def is_address(name: str) -> bool:
    """Return whether the name of a database is a URL or a DSN, not a file name."""
    return _ADDRESS.match(name) is not None


def scheme_of(name: str) -> str | None:
    """Return the scheme of a URL, `postgresql` for a DSN, None for a file name."""
    found = _ADDRESS.match(name)
    if found is None:
        return None
    return (found["scheme"] or POSTGRES[0]).lower()


def without_password(name: str) -> str:
    """Return a URL with its passwords masked. In doubt it masks more than the password."""
    if not is_address(name):
        return name
    return _PASSWORD_BY_NAME.sub(r"\1***", _PASSWORD.sub(r"\1:***@", name))
