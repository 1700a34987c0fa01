"""The reference: a page for each public room, of signatures and docstrings, which griffe reads without importing."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import griffe

from site_builder.layout import ROOT, Tree

# A room, and what its page is called; in the order of the list of pages.
ROOMS = {
    "hodiff": "hodiff: derivatives",
    "hodiff.functions": "hodiff.functions",
    "hodiff.nn": "hodiff.nn: modules",
    "hodiff.authoring": "hodiff.authoring",
    "hodiff.corrections": "hodiff.corrections",
    "hodiff.operators": "hodiff.operators",
    "hodiff.per_sample": "hodiff.per_sample: gradients of examples",
    "hodiff.estimators": "hodiff.estimators",
    "hodiff.implicit": "hodiff.implicit",
    "hodiff.optimize": "hodiff.optimize: minimisers",
    "hodiff.optim": "hodiff.optim: optimizers",
    "hodiff.meta": "hodiff.meta",
    "hodiff.sparse": "hodiff.sparse",
    "hodiff.atoms": "hodiff.atoms: interatomic potentials",
    "hodiff.atoms.ase": "hodiff.atoms.ase: calculators with Hessians",
    "hodiff.atoms.phonopy": "hodiff.atoms.phonopy: force constants",
    "hodiff.taylor": "hodiff.taylor",
    "hodiff.checks": "hodiff.checks",
    "hodiff.audit": "hodiff.audit",
    "hodiff.plot": "hodiff.plot",
    "hodiff.doors": "hodiff.doors: other programs",
    "hodiff.doors.lightning": "hodiff.doors.lightning",
    "hodiff.doors.transformers": "hodiff.doors.transformers",
    "hodiff.doors.gpytorch": "hodiff.doors.gpytorch",
    "hodiff.doors.laplace": "hodiff.doors.laplace",
    "hodiff.doors.linear_operator": "hodiff.doors.linear_operator",
    "hodiff.doors.pina": "hodiff.doors.pina",
}
FOLDER = "reference/api"

Documented = griffe.Function | griffe.Class


def write_api(tree: Tree) -> list[str]:
    """Write a page for each room, with all that its `__init__` exports."""
    options: griffe.GoogleOptions = {
        "returns_multiple_items": False,
        "returns_named_value": False,
        "warnings": False,
    }
    package = griffe.load("hodiff", search_paths=[ROOT], docstring_parser="google", docstring_options=options)
    assert isinstance(package, griffe.Module)
    exported = {room: _exported(package, room) for room in ROOMS}
    homes: dict[str, str] = {}
    for room, names in exported.items():
        for each in names.values():
            if each.path not in homes or each.path.startswith(f"{room}."):
                homes[each.path] = room
    pages = []
    for room, title in ROOMS.items():
        page = f"{FOLDER}/{room}.md"
        tree.write(page, "\n\n".join(_room(_module(package, room), title, exported[room], homes)) + "\n")
        pages.append(page)
    return pages


def _exported(package: griffe.Module, room: str) -> dict[str, Documented]:
    """Functions and classes that a room imports into its `__init__`, by name; of a file, those that it defines."""
    module = _module(package, room)
    own = {} if module.is_init_module else {n for n, each in module.members.items() if not each.is_alias}
    names = sorted((name for name in own or module.imports if not name.startswith("_")), key=str.lower)
    found = {name: resolved(package, f"{room}.{name}") for name in names}
    return {name: each for name, each in found.items() if isinstance(each, griffe.Function | griffe.Class)}


def _room(module: griffe.Module, title: str, exported: dict[str, Documented], homes: dict[str, str]) -> Iterator[str]:
    """A page: a line for each name, then those whose home this room is; others stand on the page of theirs."""
    room = module.path
    yield f"# {title}"
    yield module.docstring.value if module.docstring else ""
    yield f":::{{py:module}} {room}\n:::"
    rows = [
        f"| {{py:obj}}`{name} <{homes[each.path]}.{name}>` | {_first_line(each)} |" for name, each in exported.items()
    ]
    yield "\n".join(["| | |", "|---|---|", *rows])
    for name, each in exported.items():
        if homes[each.path] == room:
            yield f"## {name}"
            yield _entry(each, name)


def _module(package: griffe.Module, path: str) -> griffe.Module:
    found: griffe.Object | griffe.Alias = package
    for part in path.split(".")[1:]:
        found = found.members[part]
    assert isinstance(found, griffe.Module)
    return found


def resolved(package: griffe.Module, path: str) -> griffe.Object | griffe.Alias | None:
    """What a public name stands for: imports come before submodules, which often have the name of their function."""
    *before, name = path.split(".")
    found: griffe.Object | griffe.Alias = package
    for part in before[1:]:
        found = found.members[part]
    if isinstance(found, griffe.Module) and name in found.imports:
        target = found.imports[name]
        return resolved(package, target) if target.startswith("hodiff.") and target != path else None
    return found.members.get(name)


def _first_line(each: Documented) -> str:
    return each.docstring.value.split("\n\n")[0].replace("\n", " ").replace("|", "\\|") if each.docstring else ""


def _entry(each: Documented, name: str) -> str:
    """A directive of Sphinx's Python domain; MyST reads its content as Markdown."""
    if isinstance(each, griffe.Class):
        constructor = each.all_members.get("__init__")
        signature = _signature(constructor) if isinstance(constructor, griffe.Function) else _of_dataclass(each)
        body = [_text(each), *(_method(method) for method in _methods(each))]
        return _directive("py:class", f"{name}{signature}", "\n\n".join(body))
    assert isinstance(each, griffe.Function)
    returns = f" -> {each.returns}" if each.returns else ""
    return _directive("py:function", f"{name}{_signature(each)}{returns}", _text(each))


def _methods(each: griffe.Class) -> list[griffe.Function]:
    return [
        m
        for m in each.members.values()
        if isinstance(m, griffe.Function) and m.docstring and not m.name.startswith("_")
    ]


def _method(method: griffe.Function) -> str:
    if "property" in method.labels:
        return _directive("py:property", method.name, _text(method))
    returns = f" -> {method.returns}" if method.returns else ""
    return _directive("py:method", f"{method.name}{_signature(method)}{returns}", _text(method))


def _of_dataclass(each: griffe.Class) -> str:
    if not any("dataclass" in str(decorator.value) for decorator in each.decorators):
        return ""
    fields = [
        f"{a.name}{f': {a.annotation}' if a.annotation else ''}" for a in each.attributes.values() if a.annotation
    ]
    return f"({', '.join(fields)})"


def _signature(function: griffe.Function) -> str:
    parts: list[str] = []
    star = False
    for parameter in function.parameters:
        if parameter.name in {"self", "cls"} and not parts:
            continue
        kind = parameter.kind
        if kind is griffe.ParameterKind.keyword_only and not star:
            parts.append("*")
            star = True
        prefix = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(kind, "")
        star = star or kind is griffe.ParameterKind.var_positional
        annotation = f": {parameter.annotation}" if parameter.annotation else ""
        default = "" if parameter.default is None or prefix else f" = {parameter.default}"
        parts.append(f"{prefix}{parameter.name}{annotation}{default}")
    return f"({', '.join(parts)})"


def _directive(kind: str, argument: str, body: str) -> str:
    colons = max([2, *(len(run) for run in re.findall(r"^ *(:{3,})", body, re.MULTILINE))]) + 1
    return f"{':' * colons}{{{kind}}} {' '.join(argument.split())}\n\n{body.strip()}\n{':' * colons}"


def _text(each: Documented) -> str:
    if not each.docstring:
        return ""
    return "\n\n".join(_section(section) for section in each.docstring.parsed)


def _section(section: griffe.DocstringSection) -> str:
    kind, value = section.kind, section.value
    if kind is griffe.DocstringSectionKind.text:
        return str(value)
    if kind is griffe.DocstringSectionKind.admonition:
        return (
            _example(value.contents) if value.kind.startswith("example") else f"**{section.title}**\n\n{value.contents}"
        )
    if kind is griffe.DocstringSectionKind.examples:
        return "\n\n".join(_example(text) for _, text in value)
    return _fields(kind, value)


def _example(text: str) -> str:
    parts = []
    for part in re.split(r"\n\n(?=[^ >.])|(?<=\n\n)(?=>>>)", text.strip()):
        parts.append(f"```python\n{part.strip()}\n```" if part.lstrip().startswith(">>>") else part.strip())
    return "\n\n".join(parts)


_FIELDS = {
    griffe.DocstringSectionKind.parameters: "param {name}",
    griffe.DocstringSectionKind.attributes: "ivar {name}",
    griffe.DocstringSectionKind.returns: "returns",
    griffe.DocstringSectionKind.yields: "yields",
    griffe.DocstringSectionKind.raises: "raises {annotation}",
}


def _fields(kind: griffe.DocstringSectionKind, items: list[griffe.DocstringElement]) -> str:
    lines = []
    for item in items:
        name = getattr(item, "name", "").replace("*", "\\*")
        label = _FIELDS[kind].format(name=name, annotation=item.annotation)
        description = textwrap.indent(item.description.strip(), "    ").strip()
        lines.append(f":{label}: {description}")
    return "\n".join(lines)
