"""The options of every sparse Hessian, with their types, defaults, explanations and validators."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, TypedDict

from hodiff.common.chunks import require_chunk_size
from hodiff.common.keyword_options import Default
from hodiff.common.options import require_bool, require_choice
from hodiff.derivatives.route_choice import validate_route
from hodiff.sparse.coloring import Coloring
from hodiff.sparse.coloring.layouts import FORMATS

METHODS = ("star", "acyclic")


def _validated_elsewhere(caller: str, name: str, value: Any) -> None:
    """Accept any value: patterns and colorings are validated where they are used."""


def _require_route(caller: str, name: str, value: Any) -> None:
    validate_route(value, caller)


class HessianOptions(TypedDict, total=False):
    """Options of every sparse Hessian, which do not depend on the differentiated function."""

    pattern: Annotated[
        Any,
        Default(None, "Where the Hessian may have entries, if that is known: what `hodiff.sparse.color` takes."),
        _validated_elsewhere,
    ]
    coloring: Annotated[
        Coloring | None,
        Default(None, 'A coloring of it, made before: `hodiff.sparse.color(pattern)`, of method "star" or "acyclic".'),
        _validated_elsewhere,
    ]
    method: Annotated[
        str,
        Default(
            "star",
            'How a pattern is colored: "star", whose entries are read from the products, or "acyclic", whose entries '
            "come by substitution, from about half as many products, with more rounding.",
        ),
        partial(require_choice, choices=METHODS),
    ]
    format: Annotated[
        str,
        Default(
            "csr",
            '"csr" or "coo", a sparse tensor; "scipy", a `csr_array`; or "values", the entries alone in the order of '
            "compressed rows, which has derivatives of every kind.",
        ),
        partial(require_choice, choices=FORMATS),
    ]
    check: Annotated[
        bool,
        Default(
            True,
            "Whether the matrix is held against one more product, with a random vector, which shows entries outside of "
            "the pattern; then the pattern is looked for again, and a given one is refused. Not inside transforms of "
            "torch.func.",
        ),
        require_bool,
    ]
    compile: Annotated[
        bool,
        Default(
            False,
            "Whether the gradient and all products are one graph, compiled with `torch.compile` as by "
            "`hodiff.compile_gradient`: several times faster after a first call that takes seconds and is compared "
            "with eager. Its results have no derivatives of their own.",
        ),
        require_bool,
    ]
    route: Annotated[str, Default("auto", "As in `hodiff.hvp`; not beside `compile`."), _require_route]
    chunk_size: Annotated[
        int | str | None,
        Default(
            "auto",
            'How many products are made at once: a positive int, None for all, or "auto" for as many as keep '
            "intermediate results within 64 MiB on a CPU and 1 GiB on a GPU.",
        ),
        require_chunk_size,
    ]
    correct: Annotated[bool, Default(True, "As in `hodiff.hvp`."), require_bool]
