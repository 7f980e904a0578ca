"""Dumps of databases on the server of a test run, and databases restored from them."""

import os
import subprocess
from pathlib import Path
from typing import Any

from psycopg import sql

from tests.servers import postgres


def dump(url: str, file: Path) -> None:
    """Dump a database, which may be in use."""
    _run("pg_dump", "--format=custom", f"--file={file}", f"--dbname={url}")


def restore(file: Path, name: str) -> str:
    """Restore a dump into a new database of this name, replacing an old one; return its URL."""
    server = postgres.of_this_run()
    server.drop(name)
    server.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    _run("pg_restore", f"--dbname={server.url(name)}", str(file))
    return server.url(name)


def _run(program: str, *arguments: str) -> None:
    environment = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"}
    command = [str(postgres.installed_programs() / program), *arguments]
    done: Any = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
