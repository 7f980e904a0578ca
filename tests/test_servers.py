"""The PostgreSQL server of the tests runs as long as a process uses it, and no longer."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from fairturn.model import NewDocument
from fairturn.stores.postgres import PostgresStore
from tests.servers import postgres
from tests.servers.postgres import Server
from tests.servers.queues import Databases

ROOT = Path(__file__).parent.parent
PATIENCE_S = 60
NOT_OURS = pytest.mark.skipif(
    postgres.ANOTHER in os.environ, reason=f"{postgres.ANOTHER} names another server"
)


def test_a_database_is_a_copy_of_its_template() -> None:
    with postgres.started() as server:
        template = server.create("first")
        with psycopg.connect(template) as connection:
            connection.execute("CREATE TABLE numbers AS SELECT 42 AS n")

        with psycopg.connect(server.create("copy", "first")) as connection:
            assert connection.execute("SELECT n FROM numbers").fetchall() == [(42,)]
        server.drop("copy")

        assert server.execute(sql.SQL("SELECT 1 FROM pg_database WHERE datname = 'copy'")) == []


@NOT_OURS
def test_all_who_name_a_folder_share_a_server(tmp_path: Path) -> None:
    with postgres.shared(tmp_path) as one, postgres.shared(tmp_path) as other:
        assert one.pid == other.pid


def test_a_recycled_database_has_the_same_rows_as_a_new_one() -> None:
    with Databases(recycled=True) as databases:
        used = databases.new()
        store = PostgresStore(used)
        store.submit([NewDocument("acme", "1")])
        store.claim(1, worker="w", lease_us=30_000_000)
        store.close()

    with Databases(recycled=True) as databases, Databases() as others:
        assert databases.new() == used
        assert _rows(used) == _rows(others.new())


def _rows(url: str) -> dict[str, list[Any]]:
    """Return the rows of every table, and the state of every sequence."""
    with psycopg.connect(url) as connection:
        names = connection.execute(
            "SELECT relname, CASE relkind WHEN 'r' THEN '*' ELSE 'last_value, is_called' END"
            " FROM pg_class WHERE relkind IN ('r', 'S')"
            " AND relnamespace = 'fairturn'::regnamespace"
        ).fetchall()
        return {
            name: connection.execute(f"SELECT {said} FROM fairturn.{name} ORDER BY 1").fetchall()
            for name, said in names
        }


def test_all_tests_of_a_process_share_a_server() -> None:
    assert postgres.of_this_run() is postgres.of_this_run()


@NOT_OURS
def test_the_server_ends_when_its_last_user_was_killed(tmp_path: Path) -> None:
    user = subprocess.Popen(
        [sys.executable, "-m", "tests.test_servers", str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert user.stdout is not None
    server = int(user.stdout.readline())
    gone = os.pidfd_open(server)
    user.send_signal(signal.SIGKILL)
    user.communicate()

    assert _ends(gone)


def _ends(process: int) -> bool:
    """Return whether a process ends, by its file descriptor."""
    readable, *_ = select.select([process], [], [], PATIENCE_S)
    os.close(process)
    return bool(readable)


def use(folder: Path) -> None:
    """Use a server forever."""
    with postgres.shared(folder) as server:
        assert isinstance(server, Server)
        sys.stdout.write(f"{server.pid}\n")
        sys.stdout.flush()
        signal.pause()


if __name__ == "__main__":
    use(Path(sys.argv[1]))
