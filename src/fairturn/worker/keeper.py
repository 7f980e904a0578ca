"""The keeper: the parent of the process that runs a handler.

It runs nothing of anybody else's. It waits until the handler's process or the worker is gone, and
then ends everything that is left below it, also what has put itself into a session of its own. So
nothing stays behind even when the worker is killed with SIGKILL.
"""

import os
import select
import signal
from collections.abc import Callable
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_MS = 100  # where no descriptor tells that a process has ended


def keep(runner: int, life: int) -> None:
    """Be the keeper of the process that runs the handler, and end as it ends."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    _wait_for_the_end(runner, life)
    _kill(-runner)
    status = None
    while (ended := _reap_all_that_is_left()) is not None:
        pid, its_status = ended
        if pid == runner:
            status = its_status
    _exit_as(status)


def _wait_for_the_end(runner: int, life: int) -> None:
    """Until the runner has ended, or the other end of `life` is closed."""
    poller = select.poll()
    poller.register(life, select.POLLIN)
    open_pid = getattr(os, "pidfd_open", None)  # Linux only
    if open_pid is not None:
        poller.register(open_pid(runner), select.POLLIN)
    while not poller.poll(None if open_pid is not None else _LOOK_MS):
        if os.waitid(os.P_PID, runner, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return


def _reap_all_that_is_left() -> tuple[int, int] | None:
    """Kill all children and take in one of them; None if there is none. What they leave becomes
    ours in turn, because we are their subreaper."""
    for pid in _children():
        _kill(pid)
    try:
        return os.waitpid(-1, 0)
    except ChildProcessError:
        return None


def _children() -> list[int]:
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return _children_by_parent(me)


def _children_by_parent(me: int) -> list[int]:
    children = []
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []  # no such folder on this system: the process group was killed
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == me:
            children.append(pid)
    return children


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _exit_as(status: int | None) -> None:
    """End as the runner has ended, so that the worker sees it as if it had been its own child."""
    if status is None:
        os._exit(1)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def process_control() -> Callable[[int, int], object]:
    """prctl, where there is one: the option, and its value."""
    try:
        import ctypes

        found: Callable[[int, int], object] = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return lambda option, value: None
    return found
