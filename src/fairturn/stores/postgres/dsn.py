"""The address of a database: what the driver makes of it, and what people may see of it."""

import re

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fairturn.errors import StoreRefused

CONNECT_S = 10
# Unless the address says otherwise: a lost server is noticed, and a standby is not taken for one.
_KEEPALIVES = {
    "keepalives": "1",
    "keepalives_idle": "20",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
    "target_session_attrs": "read-write",
    "application_name": "fairturn",
    "connect_timeout": str(CONNECT_S),
}
_NO_URL = (
    "the address of the database is no PostgreSQL URL{why}; write "
    "postgresql://role:password@host:port/database, with %-signs for special characters"
)
_UNKNOWN = re.compile(r'invalid URI query parameter: "(\w+)"', re.ASCII)


def parse(url: str) -> tuple[str, str]:
    """A URL as the driver takes it, and a name for people, without a password."""
    url = url.strip()
    try:
        parts = conninfo_to_dict(url)
    except psycopg.Error as error:
        # Without what else the driver says, which may hold a part of the password; and so may what
        # comes before an @.
        unknown = None if "@" in url.partition("?")[2] else _UNKNOWN.search(str(error))
        why = f": {unknown[1]} is no parameter of a connection" if unknown else ""
        raise StoreRefused(_NO_URL.format(why=why)) from None
    if not re.fullmatch(r"[\d,]*", str(parts.get("port") or "")):
        raise StoreRefused(_NO_URL.format(why=": its port is no number"))
    if "@" in str(parts.get("host")):
        raise StoreRefused(_NO_URL.format(why=": a password with an @ has it as %40"))
    host = parts.get("host") or parts.get("hostaddr") or "localhost"
    port = f":{parts['port']}" if parts.get("port") else ""
    name = f"the database {parts.get('dbname') or parts.get('user') or ''!s} at {host}{port}"
    given = {name: value for name, value in _KEEPALIVES.items() if parts.get(name) is None}
    return make_conninfo(url, **given), name
