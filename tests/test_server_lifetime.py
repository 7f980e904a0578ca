"""The servers of the tests stop with their last user, even after kill -9."""

import os
import subprocess
import sys
from pathlib import Path

from tests.wait import wait_until

ROOT = Path(__file__).parent.parent
PROGRAM = """
import sys
from tests.servers import valkey
with valkey.started() as server:
    folder = server.command("CONFIG", "GET", "dir")["dir"]
    print(folder, server.client().info()["process_id"], flush=True)
    sys.stdin.read()
"""


def test_a_server_and_its_folder_are_gone_when_its_user_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as user:
        assert user.stdout is not None
        folder, pid = user.stdout.readline().split()
        assert is_running(int(pid))

        user.kill()

    wait_until(lambda: not is_running(int(pid)), "the server ends")
    wait_until(lambda: not Path(folder).exists(), "its folder is removed")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] != "Z"
