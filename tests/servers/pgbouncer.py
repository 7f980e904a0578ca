"""A PgBouncer in transaction mode in front of a server, from Debian's package."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg

PATIENCE_S = 30


def find() -> str | None:
    """Return the program's path, if it is installed."""
    return shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin")


@contextmanager
def started(server_url: str, *, server_connections: int) -> Iterator[str]:
    """Yield the URL of a database behind a pooler with few connections to the server."""
    program = find()
    assert program is not None
    server = urlsplit(server_url)
    database = server.path.lstrip("/")
    folder = Path(tempfile.mkdtemp(prefix="fairturn-pgbouncer-"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    (folder / "users.txt").write_text('"postgres" ""\n')
    (folder / "pgbouncer.ini").write_text(
        f"""[databases]
{database} = host={server.hostname} port={server.port} dbname={database} user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
auth_file = {folder}/users.txt
pool_mode = transaction
default_pool_size = {server_connections}
max_client_conn = 200
ignore_startup_parameters = extra_float_digits
logfile = {folder}/log
"""
    )
    user = "nobody" if os.geteuid() == 0 else None
    if user is not None:
        owner = pwd.getpwnam(user).pw_uid
        for path in (folder, *folder.iterdir()):
            os.chown(path, owner, -1)
    process = subprocess.Popen(
        [program, str(folder / "pgbouncer.ini")],
        user=user,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"postgresql://postgres@127.0.0.1:{port}/{database}"
        _wait_until_it_answers(url, process, folder)
        yield url
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes], folder: Path) -> None:
    for _ in range(PATIENCE_S * 20):
        try:
            psycopg.connect(url).close()
            return
        except psycopg.OperationalError as error:
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            raise RuntimeError((folder / "log").read_text()[-2_000:]) from error
    raise RuntimeError(f"PgBouncer does not answer after {PATIENCE_S} s")
