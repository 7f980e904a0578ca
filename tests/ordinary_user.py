"""Run Python as an ordinary user: `python -m tests.ordinary_user ARGUMENTS`.

As root, it changes to a user that owns nothing. If that user cannot reach Python or this repository
because they lie in a private folder such as /root, it mounts them into a copy of that folder, which
only this process and its children see.
"""

import os
import sys
import tempfile
from pathlib import Path

from fairturn.worker import reaper

USER = 54_321
ROOT = Path(__file__).parent.parent
_NEW_MOUNTS, _BIND, _MOVE, _PRIVATE = 0x0002_0000, 0x1000, 0x2000, 0x4_4000


def command() -> list[str]:
    """Return the beginning of a command that runs Python as an ordinary user."""
    if os.geteuid():
        return [sys.executable]
    return [sys.executable, "-m", "tests.ordinary_user"]


def folder() -> Path:
    """Return a new folder of the ordinary user."""
    made = Path(tempfile.mkdtemp(prefix="fairturn-ordinary-"))
    if not os.geteuid():
        os.chown(made, USER, USER)
    return made


def _private_folder(path: Path) -> Path | None:
    """Return the first folder on the way to a path that other users cannot enter."""
    on_the_way = [*reversed(path.parents), path]
    return next((one for one in on_the_way if not one.stat().st_mode & 0o001), None)


def _make_reachable(paths: list[Path]) -> None:
    system = reaper.libc()
    hidden: dict[Path, list[Path]] = {}
    for path in paths:
        if folder := _private_folder(path):
            hidden.setdefault(folder, []).append(path)
    if not hidden:
        return

    def mount(what: str, where: str, kind: str | None, flags: int) -> None:
        given = (what.encode(), where.encode(), kind.encode() if kind else None)
        options = b"mode=755" if kind else None
        assert not system.mount(*given, flags, options), f"{where} cannot be mounted"

    assert not system.unshare(_NEW_MOUNTS)
    mount("none", "/", None, _PRIVATE)
    with tempfile.TemporaryDirectory() as beside:
        for folder, inside in hidden.items():
            for number, path in enumerate(inside):
                (there := Path(beside, str(number))).mkdir()
                mount(str(path), str(there), None, _BIND)
            mount("tmpfs", str(folder), "tmpfs", 0)
            for number, path in enumerate(inside):
                path.mkdir(parents=True, exist_ok=True)
                mount(str(Path(beside, str(number))), str(path), None, _MOVE)


def main() -> None:
    python = Path(sys.base_prefix).resolve()
    _make_reachable([python, ROOT])
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    os.environ["HOME"] = os.environ["TMPDIR"] = tempfile.gettempdir()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    main()
