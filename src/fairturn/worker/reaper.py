"""The program of a child: a reaper, an init below it, and the runner, which runs the handler.

The init is the first process of a PID namespace, where the system allows one: when it ends, the
kernel kills every process of the namespace. The reaper ends the init when the worker ends, and the
init ends when the reaper does. Without a namespace both are subreapers, and the one that is left
kills all processes below it, including daemons in their own session, even if the worker, the reaper
or the init is killed with SIGKILL. Without a namespace this is best effort: a handler that forks
faster than they kill, or kills them, can leave a process running.

This file runs as a script, without `site` and before fairturn is imported: there is one reaper for
each runner, so it must use little memory.
"""

import os
import select
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PR_SET_DUMPABLE = 4
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER = 1, 24, 36
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _CLEAR_ALL = 38, 47, 4
_NEW_MOUNTS, _NEW_USERS, _NEW_PIDS = 0x0002_0000, 0x1000_0000, 0x2000_0000  # of `unshare`
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_SLAVE = 2, 4, 8, 0x4000, 0x8_0000
_CAPABILITIES_3, _CAPABILITIES = 0x2008_0522, 64
# What root keeps: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID, NET_BIND_SERVICE.
_KEPT = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 6 | 1 << 7 | 1 << 10
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT, _SCOPE_SIGNAL = 444, 446, 2  # the same on all architectures
_RESERVED_PIDS = 300  # the kernel assigns them only once
_PIDS = 30_000  # range of the first process id in a namespace
_POLL_MS = 100  # where the system has no pidfd
PROBE = "probe"  # the argument that only tries a namespace


def main(package: str, pipes: str, namespace: int, processes: int) -> None:
    """Fork the init, which forks the runner, and become the reaper.

    `namespace` is 1 for a PID namespace, which `probe` found to be allowed. `processes` limits the
    processes and threads in it, for root; 0 for no limit.
    """
    orders, permits, replies, life = map(int, pipes.split(","))
    system = libc()
    control(system, _PR_SET_NO_NEW_PRIVS, 1)
    control(system, _PR_SET_CHILD_SUBREAPER, 1)
    alive, held = os.pipe()  # the init reads the end of the reaper from it
    status, report = os.pipe()  # and the reaper the exit status of the runner
    kept = _KEPT
    if namespace:
        kept = _new_namespace(system)
    control(system, PR_SET_DUMPABLE, 0)
    init = os.fork()
    if init:
        _close(orders, permits, replies, alive, report)
        _supervise(init, life, status, None)
    _close(life, held, status)
    control(system, _PR_SET_CHILD_SUBREAPER, 1)
    if namespace:
        _hide_processes(system)
        _limit_pids(processes if kept else 0)
    init = os.getpid()
    runner = os.fork()
    if runner:
        _close(orders, permits, replies)
        _supervise(runner, alive, None, report)
    _close(alive, report)
    os.setpgid(0, 0)
    control(system, _PR_SET_CHILD_SUBREAPER, 1)
    _drop_capabilities(system, kept)
    _scope_signals(system)
    control(system, _PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != init:
        os._exit(1)
    _run(package, orders, permits, replies)


def _run(package: str, orders: int, permits: int, replies: int) -> None:
    import site

    site.main()
    sys.path.append(package)
    from fairturn.worker.child import work

    work(orders, permits, replies)


def probe() -> None:
    """Exit with 0 if this system allows a PID namespace with a /proc of its own, 1 if not."""
    system = libc()
    try:
        _new_namespace(system)
        init = os.fork()
        if not init:
            _hide_processes(system)
            os._exit(0)
        os._exit(os.waitpid(init, 0)[1] and 1)
    except (OSError, AttributeError):  # not allowed, or not Linux
        os._exit(1)


# ── Reaper and init ──────────────────────────────────────────────────────────────────────────────


def _supervise(child: int, watched: int, status: int | None, report: int | None) -> None:
    """Wait until the child has ended or the pipe `watched` is closed, then kill all processes below
    and exit. The init writes the runner's exit status to `report`, because the first process of a
    namespace cannot end by a signal of its own; the reaper reads it from `status`."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    code = _wait_for_end(child, watched)
    _kill(-child)
    while (ended := _kill_and_reap_one()) is not None:
        pid, its_code = ended
        if pid == child:
            code = its_code
    if report is not None:
        os.write(report, b"%d" % (-1 if code is None else code))
        os._exit(0)
    assert status is not None
    reported = os.read(status, 20)
    _exit_as(int(reported) if reported else code)


def _wait_for_end(child: int, watched: int) -> int | None:
    """Wait until the child has ended or `watched` is closed. Return the exit status if the child
    was reaped here, which happens without a pidfd."""
    poller = select.poll()
    poller.register(watched, select.POLLIN)
    try:
        poller.register(os.pidfd_open(child), select.POLLIN)
    except (AttributeError, OSError):
        pass  # not Linux, or an old kernel: poll
    else:
        poller.poll()
        return None
    while not poller.poll(_POLL_MS):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == child:
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
    if me == 1:
        return [-1]  # in a namespace of its own: every other process
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
    if status is None or status < 0:
        os._exit(1)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


# ── Isolation ────────────────────────────────────────────────────────────────────────────────────


def libc() -> "Any":
    """Return the C library, or None where ctypes cannot load it."""
    try:
        import ctypes

        return ctypes.CDLL(None, use_errno=True)
    except (ImportError, OSError):
        return None


def control(system: "Any", option: int, value: int) -> None:
    """Call `prctl`; do nothing where the system has none."""
    if hasattr(system, "prctl"):
        import ctypes

        system.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0)))


def _new_namespace(system: "Any") -> int:
    """Give the children of this process a PID namespace; return the capabilities that the runner
    may keep. Without the privilege of root, the namespace needs a user namespace around it, in
    which user and group keep their ids."""
    user, group = os.geteuid(), os.getegid()
    if not system.unshare(_NEW_PIDS):
        return _KEPT
    _check(system.unshare(_NEW_USERS | _NEW_PIDS))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return 0


def _hide_processes(system: "Any") -> None:
    """Mount a /proc that shows only the processes of this namespace, for them alone."""
    _check(system.unshare(_NEW_MOUNTS))
    _check(system.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None))
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _check(system.mount(b"proc", b"/proc", b"proc", flags, None))


def _limit_pids(processes: int) -> None:
    """Begin at a random process id, because programs derive names of files in shared folders from
    theirs, and limit the ids if `processes` is positive: RLIMIT_NPROC does not bind root."""
    first = _RESERVED_PIDS + int.from_bytes(os.urandom(4), "big") % (processes or _PIDS)
    # Before Linux 6.14 this is a setting of the whole system.
    if processes and is_kernel_since(6, 14):
        _write_setting("pid_max", _RESERVED_PIDS + processes + 1)
    _write_setting("ns_last_pid", first)


def is_kernel_since(major: int, minor: int) -> bool:
    release = os.uname().release.split(".")
    return [int(part) for part in release[:2] if part.isdigit()] >= [major, minor]


def _write_setting(name: str, value: int) -> None:
    try:
        with open(f"/proc/sys/kernel/{name}", "w") as file:
            file.write(str(value))
    except OSError:
        pass  # a kernel without this setting, or a container in which it is read-only


def _drop_capabilities(system: "Any", kept: int) -> None:
    """Drop all capabilities but these, also for programs that the handler starts."""
    if not hasattr(system, "capset"):
        return
    import ctypes

    for number in range(_CAPABILITIES):
        if not kept >> number & 1:
            control(system, _PR_CAPBSET_DROP, number)
    control(system, _PR_CAP_AMBIENT, _CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; low words, then high words
    _check(system.capget(header, sets))
    for number in range(6):
        word = 0 if number % 3 == 2 else kept >> 32 * (number // 3) & 0xFFFF_FFFF
        sets[number] &= word
    _check(system.capset(header, sets))


def _scope_signals(system: "Any") -> None:
    """Allow signals to processes below this one only, with Landlock (since Linux 6.12); it also
    denies access to the memory of the others. An older kernel refuses, and nothing changes."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    rules = (ctypes.c_uint64 * 3)(0, 0, _SCOPE_SIGNAL)  # files, network, scope
    descriptor = system.syscall(_LANDLOCK_CREATE, rules, ctypes.c_size_t(24), 0)
    if descriptor >= 0:
        system.syscall(_LANDLOCK_RESTRICT, descriptor, 0)
        os.close(descriptor)


def _check(result: int) -> None:
    if result:
        import ctypes

        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    if sys.argv[1] == PROBE:
        probe()
    main(sys.argv.pop(1), sys.argv.pop(1), int(sys.argv.pop(1)), int(sys.argv.pop(1)))
