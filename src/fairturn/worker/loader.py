"""Handlers by name: how a worker names one, and how a child, or a worker with threads, loads it."""

import os
import sys
from importlib import import_module

from fairturn.worker.handler import Handler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAIN = "__fairturn_main__"  # what a script is called while a child loads it


def reference_of(handler: Handler | str) -> str:
    """A handler as `module:qualname`, by which a child finds it."""
    if isinstance(handler, str):
        module, colon, name = handler.partition(":")
        if not (module and colon and name):
            raise ValueError(f"handler is {handler!r}; it must be a function, or module:function")
        if module.endswith(".py"):
            right = f"{module.removesuffix('.py').strip('./').replace('/', '.')}:{name}"
            raise ValueError(f"handler is {handler!r}; leave out .py, as in {right}")
        if module == "__main__":
            _refuse_what_was_typed_in(name)
        return handler
    home, path = getattr(handler, "__module__", None), getattr(handler, "__qualname__", None)
    if not isinstance(home, str) or not isinstance(path, str):
        raise TypeError(
            f"handler is {handler!r}, which has no name to import it by; make it a function"
        )
    if "<" in path:
        raise ValueError(
            f"the handler {home}:{path} cannot be imported by a child process, because it is "
            "a lambda or was defined inside a function; move it to the top of a module, "
            "or use threads=True"
        )
    if home == "__main__":
        _refuse_what_was_typed_in(path)
    return f"{home}:{path}"


def _refuse_what_was_typed_in(path: str) -> None:
    if main_module() is None:
        raise ValueError(
            f"the handler {path} was typed in, or read from standard input, so no child process "
            "can import it; move it to a module, or use threads=True"
        )


def main_module() -> "dict[str, Any] | None":
    """How a child can load the script that this process was started with; None without one."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return {"name": str(spec.name), "argv": sys.argv}
    file = getattr(main, "__file__", None)  # "<stdin>" if the script came through a pipe
    if not file or not os.path.isfile(file):
        return None
    return {"file": os.path.abspath(file), "argv": sys.argv}


def load(reference: str, main_module: "dict[str, Any] | None" = None) -> Handler:
    """The function that `module:qualname` names."""
    module_name, _, qualname = reference.partition(":")
    found: object
    if module_name == "__main__" and main_module is not None:
        found = _load_main(main_module)
    else:
        found = import_module(module_name)
    for part in qualname.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{reference} is not a function")
    return found


def _load_main(main_module: "dict[str, Any]") -> object:
    """The script that the worker was started from, without its `if __name__ == "__main__"`."""
    import runpy
    from types import ModuleType

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
    """Refuse to start a worker while a script is being loaded: each child would start its own."""
    if MAIN in sys.modules:
        raise RuntimeError(
            "a worker was started while a child process loads the script; "
            'put what starts it below: if __name__ == "__main__":'
        )
