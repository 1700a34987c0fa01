"""torch's operators in Taylor mode, printed as JSON: `python operators_worker.py [part of a name]`.

Each is called along random polynomials in several directions, to order 3 and, with the highest coefficient summed over
the directions, to order 2; what comes out is held against nested forward mode, direction by direction, with hodiff's
corrections. It runs in a process of its own, as importing torch's database changes switches of torch.
"""

import json
import math
import sys
import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import hodiff
from hodiff.checks.audit.samples import ILL_POSED
from hodiff.derivatives.transforms import push
from hodiff.taylor.jets import Jet
from hodiff.taylor.passes import framed, through
from hodiff.taylor.substitution import call

D, DIRECTIONS, ELEMENTS = torch.float64, 2, 1500
# Functions of symmetric matrices, of which torch reads one half: derivatives along other curves mean nothing.
SYMMETRIC = {"cholesky", "linalg.cholesky", "linalg.eigh", "linalg.eigvalsh"}


def moving(op, sample):
    """The function of its tensors of floating-point numbers, and them."""
    flat, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    places = [i for i, each in enumerate(flat) if isinstance(each, torch.Tensor) and each.dtype == D]

    def function(*tensors):
        given = list(flat)
        for i, each in zip(places, tensors, strict=True):
            given[i] = each
        args, kwargs = pytree.tree_unflatten(given, spec)
        return call(op.op, args, kwargs)

    return function, [flat[i].detach() for i in places]


def curves(op, tensors, order):
    """Coefficients 1 to K of each, with the directions first."""
    found = [[torch.randn(DIRECTIONS, *x.shape, dtype=D) / 2 for _ in range(order)] for x in tensors]
    if op.name in SYMMETRIC:
        found = [[each + each.mT for each in terms] for terms in found]
    return found


def numbers(outputs):
    return tuple(each for each in pytree.tree_leaves(outputs) if is_number(each))


def is_number(x):
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def by_nesting(function, tensors, terms, order):
    """Coefficients of each output, for each direction."""

    def along(direction):
        def at(t):
            points = [
                x + sum(each[direction] * t ** (k + 1) for k, each in enumerate(own))
                for x, own in zip(tensors, terms, strict=True)
            ]
            return numbers(function(*points))

        def tower(t, height):
            if height == 0:
                return (at(t),)
            values, slopes, _ = push(lambda t: (tower(t, height - 1), ()), (t,), (torch.ones_like(t),))
            return (*values, slopes[-1])

        torch.manual_seed(1)
        with hodiff.corrected():
            return tower(torch.zeros((), dtype=D), order)

    each = [along(direction) for direction in range(DIRECTIONS)]
    return [
        [torch.stack([own[k][i] for own in each]) / math.factorial(k) for k in range(order + 1)]
        for i in range(len(each[0][0]))
    ]


def by_series(function, tensors, terms, order, *, collapsed):
    torch.manual_seed(1)
    with framed(order, DIRECTIONS, collapsed=collapsed) as frame:
        jets = [
            Jet(frame, [x, *own[:-1], own[-1].sum(0) if collapsed else own[-1]])
            for x, own in zip(tensors, terms, strict=True)
        ]
        found, _ = through(frame, function, jets)
    return [each for each in found if is_number(each[0])]


def distance(found, right, order, *, collapsed):
    """The largest, of finite numbers; infinite where one of them is and the other is not."""
    worst = 0.0
    for own, exact in zip(found, right, strict=True):
        for k in range(order + 1):
            expected = exact[k][0] if k == 0 else exact[k].sum(0) if collapsed and k == order else exact[k]
            got = torch.zeros_like(expected) if own[k] is None else own[k]
            finite = torch.isfinite(expected)
            if got.shape != expected.shape or not torch.equal(torch.isfinite(got), finite):
                return math.inf
            if finite.any():
                error = (got - expected)[finite].abs().max() / (1 + expected[finite].abs().max())
                worst = max(worst, error.item())
    return worst


def verdict(op, samples):
    """The worst error over two samples, or what went wrong."""
    worst, count = 0.0, 0
    for sample in samples:
        if count == 2:
            break
        function, tensors = moving(op, sample)
        elements = sum(x.numel() for x in tensors)
        if not 0 < elements <= ELEMENTS:
            continue
        terms = curves(op, tensors, 3)
        if op.name in SYMMETRIC:
            tensors = [x @ x.mT + torch.eye(x.shape[-1], dtype=D) for x in tensors]
        try:
            right = by_nesting(function, tensors, terms, 3)
        except Exception as error:
            return f"no oracle: {error}"[:100]
        if not right:
            continue
        found = by_series(function, tensors, terms, 3, collapsed=False)
        worst = max(worst, distance(found, right, 3, collapsed=False))
        shorter = [own[:2] for own in terms]
        # To order 2 the third coefficients have no part.
        found = by_series(function, tensors, shorter, 2, collapsed=True)
        worst = max(worst, distance(found, [each[:3] for each in right], 2, collapsed=True))
        count += 1
    return worst if count else "nothing to differentiate"


def main(part):
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found = {}
    for op in op_db:
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        if part not in name or name in ILL_POSED or not op.supports_autograd:
            continue
        if D not in op.supported_dtypes("cpu"):
            continue
        torch.manual_seed(0)
        try:
            found[name] = verdict(op, op.sample_inputs("cpu", D, requires_grad=False))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:200]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
