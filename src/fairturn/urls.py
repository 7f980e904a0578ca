"""Which names of a queue are addresses, and how they may be shown."""

import re

POSTGRES = ("postgresql", "postgres")
# Also what was meant as an address of PostgreSQL: with a slash or a colon too few, or in the words
# of its driver. As the name of a file it would take a password into a folder.
_ADDRESS = re.compile(
    r"\s*(?:(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://"
    r"|(?i:postgres(?:ql)?)(?::|//)"
    r"|(?:\w+\s*=\s*\S+\s+)*(?:host|hostaddr|dbname|password|service)\s*=)"
)
_PASSWORD = re.compile(r"^(\s*[A-Za-z0-9+.-]+(?::/*|//)[^:@/?#]*):.*@")
_PASSWORD_BY_NAME = re.compile(r"((?:ssl)?password\s*=\s*)(?:'[^']*'|[^&#\s]*)")


def is_address(name: str) -> bool:
    """Whether a database is named by an address, and not by a file."""
    return _ADDRESS.match(name) is not None


def scheme_of(name: str) -> str | None:
    """What stands before the :// of an address; None if it is none."""
    found = _ADDRESS.match(name)
    if found is None:
        return None
    return (found["scheme"] or POSTGRES[0]).lower()


def without_password(name: str) -> str:
    """A name as it may be shown. Rather too much is hidden than too little."""
    if not is_address(name):
        return name
    return _PASSWORD_BY_NAME.sub(r"\1***", _PASSWORD.sub(r"\1:***@", name))
