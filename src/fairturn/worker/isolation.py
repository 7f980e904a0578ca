"""What separates children from the worker: environment, namespace, memory (decision 0031)."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fairturn.worker import reaper

# Without `site`, and with no folder added to the path: the reaper imports only built-in modules.
REAPER = (sys.executable, "-S", "-P", reaper.__file__)
PROBE_S = 10.0
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?", re.ASCII)

# Variables that children get, `*` for any ending. None of them contains a secret, except that the
# URL of a proxy may contain its password: contents in a bucket are fetched through it.
PASSED = (
    # the user, the language, the time zone, temporary files
    *("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "LANGUAGE", "LC_*", "TZ", "TZDIR"),
    *("TMPDIR", "TMP", "TEMP", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_*"),
    # Python and shared libraries
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_*", "MALLOC_*"),
    # certificates and proxies
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    # threads and processors of numeric libraries, and where tools find their data
    *("OMP_*", "OPENBLAS_*", "MKL_*", "NUMEXPR_*", "BLIS_*", "VECLIB_*", "KMP_*", "GOMP_*"),
    *("CUDA_*", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "HIP_*", "ROCR_*"),
    *("TESSDATA_PREFIX", "MAGICK_*", "FONTCONFIG_*", "GS_LIB", "JAVA_HOME"),
    # OpenTelemetry; the headers of exporters contain keys
    *("TRACEPARENT", "TRACESTATE", "OTEL_*"),
)
_SECRET = "_HEADERS"


class Isolation(NamedTuple):
    """The environment of the children, and whether each has a PID namespace of its own."""

    environ: Mapping[str, str]
    namespace: bool


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return `pass_env`; raise `TypeError` or `ValueError` if it has an invalid name."""
    if isinstance(names, str):
        raise TypeError(f"pass_env is {names!r}; it must be a list of names")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"pass_env contains {name!r}; it must be the name of a variable")
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"pass_env contains {name!r}; it must be a name of an environment variable, or a "
                "prefix followed by *, such as HF_*"
            )
    return tuple(names)


def child_environment(environ: Mapping[str, str], pass_env: Sequence[str]) -> dict[str, str]:
    """Return the variables that children get: those of `PASSED` and of `pass_env`."""
    return {
        name: value
        for name, value in environ.items()
        if _is_named(name, pass_env) or (_is_named(name, PASSED) and not name.endswith(_SECRET))
    }


def _is_named(name: str, patterns: Sequence[str]) -> bool:
    return any(
        name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
        for pattern in patterns
    )


def has_namespaces(environ: Mapping[str, str]) -> bool:
    """Try whether this system allows a child a PID namespace with a /proc of its own."""
    try:
        tried = subprocess.run(
            [*REAPER, reaper.PROBE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environ,
            timeout=PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0


def limits_processes(isolation: Isolation) -> bool:
    """Whether `process_limit` applies. RLIMIT_NPROC counts one child only inside a user namespace
    (since Linux 5.14). It never binds root, whose PID namespace has its own `pid_max` (6.14)."""
    since = (5, 14) if os.geteuid() else (6, 14)
    return isolation.namespace and reaper.is_kernel_since(*since)


def hide_memory() -> None:
    """Deny processes of the same user access to the memory, the environment and the descriptors of
    this process, by ptrace and /proc, until it ends. This also disables its core dumps."""
    reaper.control(reaper.libc(), reaper.PR_SET_DUMPABLE, 0)
