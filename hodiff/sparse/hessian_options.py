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
        Default(None, "Pattern of the Hessian, if it is known, in any form that `hodiff.sparse.color` accepts."),
        _validated_elsewhere,
    ]
    coloring: Annotated[
        Coloring | None,
        Default(
            None,
            'Coloring of the pattern, computed before: `hodiff.sparse.color(pattern)` with method "star" or "acyclic".',
        ),
        _validated_elsewhere,
    ]
    method: Annotated[
        str,
        Default(
            "star",
            'Method of coloring: "star" reads entries directly from the products; "acyclic" computes them by '
            "substitution, from about half as many products, with more rounding.",
        ),
        partial(require_choice, choices=METHODS),
    ]
    format: Annotated[
        str,
        Default(
            "csr",
            '"csr" or "coo" for a sparse tensor; "scipy" for a `csr_array`; or "values" for the entries alone in '
            "the order of compressed rows, which support derivatives of every kind.",
        ),
        partial(require_choice, choices=FORMATS),
    ]
    check: Annotated[
        bool,
        Default(
            True,
            "Whether to compare the matrix with one more product, with a random vector, which shows entries "
            "outside of the pattern. If there are any, a detected pattern is detected again, and a given pattern "
            "is refused. Skipped inside transforms of torch.func.",
        ),
        require_bool,
    ]
    compile: Annotated[
        bool,
        Default(
            False,
            "Whether to compile the gradient and all products as one graph with `torch.compile`, as "
            "`hodiff.compile_gradient` does: several times faster after a first call, which takes seconds and is "
            "compared with eager. The results have no derivatives of their own.",
        ),
        require_bool,
    ]
    route: Annotated[str, Default("auto", "As in `hodiff.hvp`; not together with `compile`."), _require_route]
    chunk_size: Annotated[
        int | str | None,
        Default(
            "auto",
            'Number of products that are computed together: a positive int, None for all, or "auto" for as many '
            "as keep intermediate results within 64 MiB on a CPU and 1 GiB on a GPU.",
        ),
        require_chunk_size,
    ]
    correct: Annotated[bool, Default(True, "As in `hodiff.hvp`."), require_bool]
