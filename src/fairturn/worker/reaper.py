"""The program of a child: a keeper, and below it the process that runs the handler.

The keeper runs nothing of anybody else's. It waits until the handler's process or the worker is
gone, and then ends everything that is left below it, also what has put itself into a session of its
own. So nothing stays behind even when the worker is killed with SIGKILL.

This file is run as a script, without `site` and before anything of fairturn is imported: there is
one keeper for every process that runs a handler, and so it takes next to no memory.
"""

import os
import select
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_MS = 100  # where no descriptor tells that a process has ended


def main(package: str, orders: int, permits: int, replies: int, life: int) -> None:
    """Become the keeper of a process that runs the handler."""
    control = _process_control()
    control(_PR_SET_CHILD_SUBREAPER, 1)
    keeper = os.getpid()
    runner = os.fork()
    if runner:
        for descriptor in (orders, permits, replies):
            os.close(descriptor)
        _keep(runner, life)
    os.close(life)
    os.setpgid(0, 0)
    control(_PR_SET_CHILD_SUBREAPER, 1)
    control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(1)
    _run(package, orders, permits, replies)


def _run(package: str, orders: int, permits: int, replies: int) -> None:
    import site

    site.main()
    sys.path.append(package)
    from fairturn.worker.child import work

    work(orders, permits, replies)


def _keep(runner: int, life: int) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    status = _wait_for_the_end(runner, life)
    _kill(-runner)
    while (ended := _reap_all_that_is_left()) is not None:
        pid, its_status = ended
        if pid == runner:
            status = its_status
    _exit_as(status)


def _wait_for_the_end(runner: int, life: int) -> int | None:
    """Until the runner has ended, or the other end of `life` is closed; how it ended, where that
    can be known only by taking note of it."""
    poller = select.poll()
    poller.register(life, select.POLLIN)
    try:
        poller.register(os.pidfd_open(runner), select.POLLIN)
    except (AttributeError, OSError):
        pass  # not Linux, or an old kernel: then we look now and then
    else:
        poller.poll()
        return None
    while not poller.poll(_LOOK_MS):
        pid, status = os.waitpid(runner, os.WNOHANG)
        if pid == runner:
            return status
    return None


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
    try:  # noqa: SIM105  # contextlib is one more import
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


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


def _process_control() -> "Callable[[int, int], object]":
    """prctl, where there is one: the option, and its value."""
    try:
        import ctypes

        found: Callable[[int, int], object] = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return lambda option, value: None
    return found


if __name__ == "__main__":
    main(sys.argv.pop(1), *map(int, sys.argv.pop(1).split(",")))
