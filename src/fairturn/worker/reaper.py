"""The program of a child: a reaper, and below it the runner, the process that runs the handler.

The reaper waits until the runner or the worker has ended, then kills all processes below it, also
daemons in their own session. No process is left behind even if the worker is killed with SIGKILL.

This file runs as a script, without `site` and before fairturn is imported: there is one reaper for
each runner, so it must use little memory.
"""

import os
import select
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_MS = 100  # where the system has no pidfd


def main(package: str, orders: int, permits: int, replies: int, life: int) -> None:
    """Fork the runner and become its reaper."""
    control = _process_control()
    control(_PR_SET_CHILD_SUBREAPER, 1)
    reaper = os.getpid()
    runner = os.fork()
    if runner:
        for descriptor in (orders, permits, replies):
            os.close(descriptor)
        _supervise(runner, life)
    os.close(life)
    os.setpgid(0, 0)
    control(_PR_SET_CHILD_SUBREAPER, 1)
    control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != reaper:
        os._exit(1)
    _run(package, orders, permits, replies)


def _run(package: str, orders: int, permits: int, replies: int) -> None:
    import site

    site.main()
    sys.path.append(package)
    from fairturn.worker.child import work

    work(orders, permits, replies)


def _supervise(runner: int, life: int) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    status = _wait_for_end(runner, life)
    _kill(-runner)
    while (ended := _kill_and_reap_one()) is not None:
        pid, its_status = ended
        if pid == runner:
            status = its_status
    _exit_as(status)


def _wait_for_end(runner: int, life: int) -> int | None:
    """Wait until the runner has ended or the worker has closed `life`. Return the exit status if
    the runner was reaped here, which happens without a pidfd."""
    poller = select.poll()
    poller.register(life, select.POLLIN)
    try:
        poller.register(os.pidfd_open(runner), select.POLLIN)
    except (AttributeError, OSError):
        pass  # not Linux, or an old kernel: poll
    else:
        poller.poll()
        return None
    while not poller.poll(_POLL_MS):
        pid, status = os.waitpid(runner, os.WNOHANG)
        if pid == runner:
            return status
    return None


def _kill_and_reap_one() -> tuple[int, int] | None:
    """Kill all children and reap one; None if there is none. The subreaper inherits the orphans of
    each, so the caller repeats this."""
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
        return []  # no /proc: only the process group was killed
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
    """Exit with the runner's status or signal, for the worker to see."""
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
    """Return `prctl`, or a function that does nothing where the system has none."""
    try:
        import ctypes

        found: Callable[[int, int], object] = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return lambda option, value: None
    return found


if __name__ == "__main__":
    main(sys.argv.pop(1), *map(int, sys.argv.pop(1).split(",")))
