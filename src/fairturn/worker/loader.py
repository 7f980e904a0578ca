"""The names of handlers, by which a child or a worker with threads imports them."""

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from fairturn.worker.registry import Handler, Handlers

MAIN = "__fairturn_main__"  # `__name__` of a script that a child loads


# The name of a handler or a registry; of a registry that was given as an object, the name of each
# handler by kind, because the module of the registry alone may register none.
Reference = str | dict[str, str]


def reference_of(handler: Handler | str) -> str:
    """Return a handler's name as `module:qualname`.

    Raises `ValueError` if a child process cannot import it, `TypeError` if it has no name.
    """
    if isinstance(handler, str):
        module, colon, name = handler.partition(":")
        if not (module and colon and name):
            raise ValueError(f"handler is {handler!r}; it must be a function, or module:function")
        if module.endswith(".py"):
            right = f"{module.removesuffix('.py').strip('./').replace('/', '.')}:{name}"
            raise ValueError(f"handler is {handler!r}; leave out .py, as in {right}")
        if module == "__main__":
            _require_main_module(name)
        return handler
    home, path = getattr(handler, "__module__", None), getattr(handler, "__qualname__", None)
    if not isinstance(home, str) or not isinstance(path, str):
        raise TypeError(f"handler is {handler!r}, which has no importable name; pass a function")
    if "<" in path:
        raise ValueError(
            f"handler {home}:{path} is a lambda or was defined inside a function, so a child "
            "process cannot import it; move it to the top level of a module, or use threads=True"
        )
    if home == "__main__":
        _require_main_module(path)
    return f"{home}:{path}"


def _require_main_module(path: str) -> None:
    if main_module() is None:
        raise ValueError(
            f"handler {path} was entered interactively or read from standard input, so a child "
            "process cannot import it; move it to a module, or use threads=True"
        )


def main_module() -> dict[str, Any] | None:
    """Return how a child can load the script of this process; None if there is none."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return {"name": str(spec.name), "argv": sys.argv}
    file = getattr(main, "__file__", None)  # "<stdin>" for a script on standard input
    if not file or not os.path.isfile(file):
        return None
    return {"file": os.path.abspath(file), "argv": sys.argv}


def load(reference: Reference, main_module: dict[str, Any] | None = None) -> Handler | Handlers:
    """Import and return a handler or a registry."""
    if isinstance(reference, str):
        return _load_one(reference, main_module)
    handlers = Handlers()
    for kind, name in reference.items():
        function = _load_one(name, main_module)
        handlers(kind)(function)
    return handlers


def _load_one(reference: str, main_module: dict[str, Any] | None) -> Handler | Handlers:
    module_name, _, qualname = reference.partition(":")
    found: object
    if module_name == "__main__" and main_module is not None:
        found = sys.modules.get(MAIN) or _load_main(main_module)
    else:
        found = import_module(module_name)
    for part in qualname.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{reference} is not a function")
    return found


def _load_main(main_module: dict[str, Any]) -> object:
    """Run the worker's script without its `if __name__ == "__main__"`; return its module."""
    import runpy

    sys.argv[:] = main_module["argv"]
    module = ModuleType(MAIN)
    sys.modules["__main__"] = sys.modules[MAIN] = module
    if "name" in main_module:
        values = runpy.run_module(main_module["name"], run_name=MAIN, alter_sys=True)
    else:
        values = runpy.run_path(main_module["file"], run_name=MAIN)
    module.__dict__.update(values)
    sys.modules["__main__"] = sys.modules[MAIN] = module
    return module


def refuse_in_child() -> None:
    """Raise `RuntimeError` in a child that loads a script: each child would start a worker."""
    if MAIN in sys.modules:
        raise RuntimeError(
            "the script starts a worker when a child process imports it; "
            'start it below: if __name__ == "__main__":'
        )
