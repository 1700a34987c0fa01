"""Import of targets named `package.module:Name` or `path/to/file.py:Name`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hodiff.checks.attempts import first_line
from hodiff.errors import InputError

_FORMS = "package.module:Name or path/to/file.py:Name"


def load_target(text: str, what: str = "target") -> Any:
    """Import the target ``package.module:Name`` or ``path/to/file.py:Name``; a module class becomes an instance."""
    found = load_object(text, what)
    with _named(what):
        return _checkable(found, text)


def load_object(text: str, what: str) -> Any:
    """Import an object of any kind, ``package.module:Name`` or ``path/to/file.py:Name``."""
    place, colon, name = text.rpartition(":")
    with _named(what):
        if not colon or not place or not name:
            raise InputError(f"expected {_FORMS}, got {text!r}.")
        return _attribute(_file(Path(place)) if place.endswith(".py") else _module(place), name)


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Name the option in errors."""
    try:
        yield
    except InputError as error:
        raise InputError(f"check: {what}: {error}") from error.__cause__


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise InputError(
                f"there is no module {error.name!r} here. Run from its folder, install it, or pass the file: "
                f"path/to/{name.rpartition('.')[2]}.py:Name."
            ) from error
        raise _import_failure(name, error) from error
    except Exception as error:
        raise _import_failure(name, error) from error


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"there is no file {str(path)!r} in {str(Path.cwd())!r}.")
    # Avoid replacing a loaded module of the same name.
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_checked"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{str(path)!r} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    # As in a script, let the file import its neighbours, and let classes find their source by their module.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _import_failure(str(path), error) from error
    return module


def _import_failure(name: str, error: Exception) -> InputError:
    return InputError(f"{name!r} raises when it is imported: {first_line(error)}. Mend that first.")


def _attribute(module: ModuleType, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise InputError(f"{_name_of(found)} has no {part!r}. It has {_names(found)}.")
        found = getattr(found, part)
    return found


def _names(owner: Any) -> str:
    """Return the names of public callables defined in the module or class, as suggestions."""
    names = [name for name, value in vars(owner).items() if not name.startswith("_") and _is_made_in(owner, value)]
    return ", ".join(sorted(names)) or "nothing that could be checked"


def _is_made_in(owner: Any, value: Any) -> bool:
    if isinstance(value, staticmethod):
        return True
    return callable(value) and (
        not isinstance(owner, ModuleType) or getattr(value, "__module__", None) == owner.__name__
    )


def _name_of(owner: Any) -> str:
    return f"module {owner.__name__!r}" if isinstance(owner, ModuleType) else f"{getattr(owner, '__name__', owner)!r}"


def _checkable(found: Any, text: str) -> Any:
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        return _instance(found, text)
    if isinstance(found, type) and not issubclass(found, torch.autograd.Function):
        raise InputError(
            f"{text!r} is the class {found.__name__}; expected a torch.autograd.Function subclass, a "
            "torch.nn.Module or a function."
        )
    if not callable(found):
        raise InputError(
            f"{text!r} is of type {type(found).__name__}; expected a torch.autograd.Function "
            "subclass, a torch.nn.Module or a function."
        )
    return found


def _instance(found: type[torch.nn.Module], text: str) -> torch.nn.Module:
    needed = [
        parameter.name
        for parameter in inspect.signature(found).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
    ]
    if needed:
        raise InputError(
            f"{text!r} needs arguments: {', '.join(needed)}. Write an instance into the file, "
            f"`model = {found.__name__}(...)`, and name that."
        )
    try:
        return found()
    except Exception as error:
        raise InputError(f"{found.__name__}() raises {first_line(error)}.") from error
