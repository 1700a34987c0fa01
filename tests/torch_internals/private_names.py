"""Search the syntax tree of source code for private names of torch, for `test_private_names` and `test_names`."""

import ast
import functools
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

# pytree is private only by its name, and half of the modules use it.
_PUBLIC = "torch.utils._pytree"
_BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller", "import_module"}
_OF_NAMED_TUPLES = {"_fields", "_replace", "_asdict", "_make", "_field_defaults"}
# Also of packages without a public function for it: the graphs of MACE's calculator, the root of GPyTorch's inducing
# points, and the methods that operators of linear_operator implement.
_ALLOWED = {*_OF_NAMED_TUPLES, "_atoms_to_batch", "_inducing_inv_root"}
_ALLOWED |= {"_matmul", "_cholesky_solve", "_solve_preconditioner"}
_OWN = {"self", "cls"}
# Attributes that Python and torch add to each class.
_OF_CLASSES = {"_abc_impl", "_backward_cls"}


def is_private(name: str) -> bool:
    """Whether a name, without dots, begins with an underscore but is not one of Python's special names."""
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name != "_"


def is_private_of_torch(dotted: str) -> bool:
    """Whether a dotted name belongs to torch and has a private part."""
    parts = dotted.removeprefix(_PUBLIC).split(".") if dotted.startswith("torch.") else []
    return any(map(is_private, parts))


def private_names(source: str) -> Iterator[tuple[int, str]]:
    """Search a module for private names that are not its own.

    Args:
        source: Its text.

    Yields:
        Line and name of each use: the full name if it is reached from torch, as `torch._C._functorch`; otherwise the
        attribute alone, as `._version`.
    """
    tree = ast.parse(source)
    aliases = dict(_imports(tree))
    for node in _nodes(tree):
        if isinstance(node, ast.ImportFrom):
            for each in node.names:
                found = f"{node.module}.{each.name}"
                if is_private_of_torch(found) and not _is_stepping_stone(each.asname or each.name, tree):
                    yield node.lineno, found
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names if is_private_of_torch(each.name))
    yield from _attributes(tree, aliases)
    yield from _strings(tree)


@functools.lru_cache(maxsize=1)
def _nodes(tree: ast.AST) -> list[ast.AST]:
    """Return all nodes of a tree, cached for repeated traversals."""
    return list(ast.walk(tree))


@functools.lru_cache(maxsize=1)
def _inside_of_attributes(tree: ast.AST) -> set[int]:
    return {id(node.value) for node in _nodes(tree) if isinstance(node, ast.Attribute)}


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in _nodes(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((each.asname or each.name, f"{node.module}.{each.name}") for each in node.names)
        elif isinstance(node, ast.Import):
            for each in node.names:
                yield each.asname or each.name.split(".")[0], each.name if each.asname else each.name.split(".")[0]


def _is_stepping_stone(alias: str, tree: ast.AST) -> bool:
    """Whether an imported module is used only to reach names inside of it, which are reported separately."""
    inside = _inside_of_attributes(tree)
    uses = [node for node in _nodes(tree) if isinstance(node, ast.Name) and node.id == alias]
    return bool(uses) and all(id(node) in inside for node in uses)


def _attributes(tree: ast.AST, aliases: dict[str, str]) -> Iterator[tuple[int, str]]:
    inner = _inside_of_attributes(tree)
    for node in _nodes(tree):
        if not isinstance(node, ast.Attribute):
            continue
        root, parts = _chain(node)
        dotted = ".".join((aliases.get(root, root), *parts)) if root else ""
        if dotted.startswith("torch."):
            # Report only the longest name of a chain.
            if id(node) not in inner and is_private_of_torch(dotted):
                yield node.lineno, dotted
        elif is_private(node.attr) and node.attr not in _ALLOWED and not _is_own(node, aliases):
            yield node.lineno, f".{node.attr}"


def _is_own(node: ast.Attribute, aliases: dict[str, str]) -> bool:
    """Whether an attribute belongs to the class itself, or to a package other than torch and hodiff."""
    if isinstance(node.value, ast.Call):
        return isinstance(node.value.func, ast.Name) and node.value.func.id == "super"
    if not isinstance(node.value, ast.Name):
        return False
    package = aliases.get(node.value.id, "").split(".")[0]
    return node.value.id in _OWN or package not in {"", "torch", "hodiff"}


def _chain(node: ast.expr) -> tuple[str, list[str]]:
    """Return the first name of a chain of attributes ("" if it is not a name), and the attributes."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return (node.id if isinstance(node, ast.Name) else ""), parts


def _strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield names in strings: dotted names of torch, and attributes that are accessed by name."""
    for node in _nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"torch(\.\w+)+", node.value) and is_private_of_torch(node.value):
                yield node.lineno, node.value
        elif isinstance(node, ast.Call):
            function = _chain(node.func)[1][-1:] or [node.func.id if isinstance(node.func, ast.Name) else ""]
            if function[0] in _BY_NAME | {"startswith", "removeprefix"}:
                texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
                for text in texts:
                    if isinstance(text, str) and len(text) > 1 and is_private(text) and text not in _ALLOWED:
                        yield node.lineno, f".{text}"


def modules_in(*places: Path) -> Iterator[Path]:
    """Yield the modules in some folders; a module may be given itself."""
    for place in places:
        yield from sorted(place.rglob("*.py")) if place.is_dir() else [place]


def of_folder(*places: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield the private names in the modules of some folders."""
    for path in modules_in(*places):
        yield from ((path, line, name) for line, name in private_names(path.read_text(encoding="utf-8")))


def strings_of(*places: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield the strings in the modules of some folders."""
    for path in modules_in(*places):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path, node.lineno, node.value


def overridden(package: str) -> Iterator[str]:
    """Yield names that classes of a package define or read, and that are private in a base class of torch."""
    root = import_module(package)
    for each in pkgutil.walk_packages(root.__path__, f"{package}."):
        # A program, a C library, and kernels that require triton have no classes of torch.
        if each.name.endswith((".__main__", "._fused")) or ".triton_" in each.name:
            continue
        try:
            module = import_module(each.name)
        except ImportError as error:
            # Adapters to programs that are not installed here.
            if (error.name or "").startswith(package):
                raise
            continue
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == module.__name__:
                yield from _of_bases(cls)


def _of_bases(cls: type) -> Iterator[str]:
    bases = [base for base in cls.__mro__[1:] if base.__module__.split(".")[0] == "torch"]
    if not bases:
        return
    own = {name for name in vars(cls) if is_private(name)} - _OF_CLASSES
    own |= {
        node.attr
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls))))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in _OWN
    }
    for name in sorted(filter(is_private, own)):
        for base in bases:
            if name in vars(base) or name in getattr(base, "__annotations__", {}):
                yield f"{base.__module__}.{base.__qualname__}.{name}"
                break
