"""Break one line of one rule at a time, and check that a test of its family fails.

python tests/broken_rules.py [words of a row ...]

Works on a copy of the repository, prints a row for each rule, and exits with 1 if no test noticed some rule.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("hodiff", "kernels", "tests", "docs", "examples", "benchmarks", "papers", "pyproject.toml", "README.md")
FUNCTIONS = "tests/functions/test_contract.py"

# Name of the broken rule; the line in a file of hodiff/; its replacement; the tests that must fail
BROKEN = [
    (
        "activations: third derivative of SiLU",
        "return upper * lower * (2 - z * (upper - lower))",
        "return upper * lower * (3 - z * (upper - lower))",
        (FUNCTIONS, "-k", "silu"),
    ),
    (
        "activations: slope of the bell",
        "return b * (t * t - 2 * b)",
        "return b * (t * t - b)",
        (FUNCTIONS, "-k", "logistic or bell"),
    ),
    ("logarithms: logit", "return (2 * x - 1) * (y * y)", "return (x - 1) * (y * y)", (FUNCTIONS, "-k", "logit")),
    (
        "linear: gradient of the bias",
        "cotangent if len(shape) == 1 else cotangent.sum(-2)",
        "cotangent if len(shape) == 1 else cotangent.mean(-2)",
        ("tests/functions/linear",),
    ),
    (
        "convolution: product rule of the input's gradient",
        "None if weight_t is None else rule(cotangent, weight_t, *ctx.rest),",
        "None if weight_t is None else -rule(cotangent, weight_t, *ctx.rest),",
        (FUNCTIONS, "-k", "conv"),
    ),
    (
        "attention: curvature of the softmax",
        "return p * centred_s, p * centred_bar, _softmax_derivative(p, w)",
        "return p * centred_s, p * centred_s, _softmax_derivative(p, w)",
        (FUNCTIONS, "-k", "attention"),
    ),
    (
        "losses: curvature of linear logits",
        "else g[..., :1] * z_t - mean_t)",
        "else g[..., :1] * z_t + mean_t)",
        (FUNCTIONS, "-k", "linear_cross_entropy"),
    ),
    (
        "losses: curvature of linear logits by tiles",
        "terms.append((only_counted(options, target, wide(x)) * mean).sum(-1, keepdim=True))",
        "terms.append((only_counted(options, target, wide(x)) + mean).sum(-1, keepdim=True))",
        ("tests/functions/losses/test_linear_cross_entropy.py", "-k", "second_order"),
    ),
    (
        "losses: soft targets",
        "return (y - q) * g",
        "return (y + q) * g",
        (FUNCTIONS, "-k", "cross_entropy"),
    ),
    (
        "losses: Huber by its threshold",
        "torch.relu(residual.abs() - delta)",
        "torch.relu(residual - delta)",
        (FUNCTIONS, "-k", "huber"),
    ),
    (
        "normalization: slope of the root mean square",
        "return -(r * r) * (shift + turn)",
        "return -r * (shift + turn)",
        (FUNCTIONS, "-k", "norm"),
    ),
    (
        "softmax: tangent of logsumexp",
        "return (LogSumExpGradient.call(x, live, dim, True) * tangent)",
        "return (LogSumExpGradient.call(x, live, dim, True) * 2 * tangent)",
        (FUNCTIONS, "-k", "logsumexp"),
    ),
    (
        "projections: the mean over the support",
        "return support, (support * x).sum(dims, keepdim=True)",
        "return support, x.sum(dims, keepdim=True)",
        (FUNCTIONS, "-k", "project_simplex"),
    ),
    (
        "projections: tangent of sorting",
        "return z_tangent - _block_means(exchanged, blocks)",
        "return z_tangent + _block_means(exchanged, blocks)",
        (FUNCTIONS, "-k", "soft_"),
    ),
    (
        "projections: slope of the soft threshold",
        "return signs.abs() if index == 0 else -signs",
        "return signs.abs() if index == 0 else signs",
        (FUNCTIONS, "-k", "soft_threshold"),
    ),
    (
        "gradients: scaled tangent",
        "return None if tangent is None else tangent * (ctx.number if factor is None else factor)",
        "return tangent",
        ("tests/functions/gradients/test_control.py",),
    ),
    (
        "gradients: straight through",
        "value + (surrogate - surrogate.detach())",
        "value + 2 * (surrogate - surrogate.detach())",
        ("tests/functions/gradients/test_quantization.py",),
    ),
    (
        "numpy: tangents filled",
        "filled = [torch.zeros_like(x) if t is None else t for x, t in pairs]",
        "filled = [torch.zeros_like(x) if t is None else -t for x, t in pairs]",
        ("tests/functions/numpy",),
    ),
    (
        "sampling: Gumbel noise",
        "return -torch.log(-torch.log(u)).to(like.dtype)",
        "return torch.log(-torch.log(u)).to(like.dtype)",
        ("tests/functions/test_sampling.py",),
    ),
    (
        "rules: curvature of an elementwise rule",
        "return cls.scaled(cotangent, x) if index == 0 else cls.scaled_slope(cotangent * vector, 0, x)",
        "return cls.scaled(cotangent, x) if index == 0 else cls.scaled_slope(cotangent, 0, x)",
        ("tests/kernels/test_fused.py",),
    ),
    (
        "rules: pullback of an elementwise rule",
        "summed_to(shape, cls.scaled_slope(cotangent, index, *residuals)) if needed else None",
        "summed_to(shape, cls.scaled_slope(cotangent, 0, *residuals)) if needed else None",
        (FUNCTIONS, "-k", "xlogy"),
    ),
    (
        "recompute: a tangent too many",
        "pushed = iter(ctx.program.push(ctx.saved_tensors, tangents))",
        "pushed = iter([2 * each for each in ctx.program.push(ctx.saved_tensors, tangents)])",
        (FUNCTIONS, "-k", "checkpoint"),
    ),
    (
        "corrections, activations: hard swish",
        "return _sloped(x).to(x.dtype) / 6",
        "return _sloped(x).to(x.dtype) / 3",
        ("tests/corrections/rules/elementwise/test_activations.py",),
    ),
    (
        "corrections, linalg: gaps of eigenvalues",
        "return (1 / differences.where(~same, 1)).where(~same, 0)",
        "return (2 / differences.where(~same, 1)).where(~same, 0)",
        ("tests/corrections/rules/linalg/test_linalg.py",),
    ),
    (
        "corrections, indexing: products",
        "return (target * result if include_target else result).where(present, target)",
        "return (result if include_target else result).where(present, target)",
        ("tests/corrections/rules/indexing/test_indexing.py",),
    ),
    (
        "corrections, indexing: mean of a bag",
        "return (total / sizes.clamp(min=1).unsqueeze(-1)).to(weight.dtype)",
        "return total.to(weight.dtype)",
        ("tests/corrections/rules/indexing/test_embedding.py",),
    ),
    (
        "corrections, distances: a side of the pair",
        "return (u * (x - centre)).sum(-1, keepdim=True) - u @ (y - centre).mT",
        "return (u * (x - centre)).sum(-1, keepdim=True) + u @ (y - centre).mT",
        ("tests/corrections/rules/distances/test_distances.py",),
    ),
    (
        "corrections, losses: soft margin",
        "return REDUCE[reduction](-LogSigmoid.call(t * x).to(input.dtype))",
        "return REDUCE[reduction](-LogSigmoid.call(t + x).to(input.dtype))",
        ("tests/corrections/rules/losses/test_losses.py",),
    ),
    (
        "corrections, recurrent: the gate of a GRU",
        "return ((hidden - n) * torch.sigmoid(z + by_z) + n,)",
        "return ((hidden - n) * torch.sigmoid(z + by_z) - n,)",
        ("tests/corrections/rules/recurrent/test_recurrent.py",),
    ),
    (
        "corrections, sampling: weights of a grid",
        "return [(left, 1 - part), (left + 1, part)]",
        "return [(left, part), (left + 1, part)]",
        ("tests/corrections/rules/sampling/test_sampling.py",),
    ),
    (
        "derivatives: the product by forward over reverse",
        "_, product, aux = push(gradient(guard_reverse(f)), (primals,), (tangents,))",
        "product, _, aux = push(gradient(guard_reverse(f)), (primals,), (tangents,))",
        ("tests/derivatives/test_hvp.py",),
    ),
    (
        "operators: samples of the Fisher",
        "return OuterProducts((gradients,), factors / self.samples)",
        "return OuterProducts((gradients,), factors)",
        ("tests/operators/test_fisher.py",),
    ),
    (
        "operators: the mean over batches",
        'return total / sizes.weight if self.batches.reduction == "mean" and sizes.weight != 1.0 else total',
        "return total",
        ("tests/operators/test_hessian.py",),
    ),
    (
        "operators: the transpose of a multiple",
        "return self.factor * multiply(self.operator.T, block)",
        "return multiply(self.operator.T, block)",
        ("tests/operators/test_algebra.py",),
    ),
    (
        "operators: formulas of layers for examples that depend on each other",
        "return len(plain) == self._count and moments.is_multiple(scaled, factors, plain, eps)",
        "return len(plain) == self._count",
        ("tests/operators/test_exact_diagonal.py",),
    ),
    (
        "operators: examples evaluated alone that depend on each other",
        "if (its - true).norm() <= self._eps**0.5 * true.norm() + min(100 * self._eps, 0.02) * terms",
        "if terms >= 0",
        ("tests/operators/test_exact_diagonal.py",),
    ),
    (
        "per_sample: the divisor of a mean",
        "return count / divisor if divisor else 0.0",
        "return 1.0",
        ("tests/per_sample/test_per_sample.py",),
    ),
    (
        "estimators: Hutchinson's mean",
        "return _mean(view, count, kind, generator, view.dots)",
        "return _mean(view, count, kind, generator, lambda z, product: product.sum(0))",
        ("tests/estimators",),
    ),
    (
        "estimators: standard error",
        "return value, (spread * count / (count - 1)).sqrt() / weight",
        "return value, spread.sqrt() / weight / 2",
        ("tests/estimators",),
    ),
    (
        "estimators: damping",
        "return image + self.damping * block if self.damping else image",
        "return image - self.damping * block if self.damping else image",
        ("tests/estimators/test_solve.py",),
    ),
    (
        "implicit: sign of the tangent",
        "rhs = pytree.tree_map(torch.neg, change)",
        "rhs = change",
        ("tests/implicit/test_derivatives.py",),
    ),
    (
        "implicit: sign of the cotangent",
        "self._pullback(at, leaves, moving, pytree.tree_map(torch.neg, adjoint))",
        "self._pullback(at, leaves, moving, adjoint)",
        ("tests/implicit/test_derivatives.py",),
    ),
    (
        "meta: the system of implicit MAML",
        "return [u + each / self.strength for u, each in zip(v, Hv, strict=True)]",
        "return [u + each * self.strength for u, each in zip(v, Hv, strict=True)]",
        ("tests/meta", "-k", "imaml"),
    ),
    (
        "meta: bias of Adam's average",
        "return add_quotient(param, -self.lr / (1 - beta1**step), slots",
        "return add_quotient(param, -self.lr / (1 - beta1), slots",
        ("tests/meta/test_optimizers.py",),
    ),
    (
        "authoring: tangents of an output",
        "tangents.append(tangent if tangent.dtype == dtype else tangent.to(dtype))",
        "tangents.append(-tangent if tangent.dtype == dtype else tangent.to(dtype))",
        ("tests/authoring/test_derivatives.py",),
    ),
    (
        "grad mode: no_grad stops tangents",
        "lambda each: each if id(each) in given else each.detach()",
        "lambda each: each",
        ("tests/corrections/rules/autograd/test_grad_mode.py",),
    ),
    (
        "numbers: a tensor that moves",
        "and not value.dim() and is_observed(value)",
        "and value.dim() and is_observed(value)",
        ("tests/corrections/mechanism/test_numbers.py",),
    ),
    (
        "lists: a maximum with a number",
        "partial(_extreme, torch.maximum)",
        "partial(_extreme, torch.clamp_min)",
        ("tests/corrections/rules/elementwise/test_foreach.py",),
    ),
]


def texts_of(root: Path) -> dict[Path, str]:
    """Text of every Python file in hodiff."""
    return {path: path.read_text(encoding="utf-8") for path in sorted((root / "hodiff").rglob("*.py"))}


def file_of(line: str, texts: dict[Path, str]) -> Path:
    """Return the only file that contains the line."""
    found = [path for path, text in texts.items() if line in text]
    if len(found) != 1:
        names = [str(path) for path in found]
        raise SystemExit(
            f"expected one file with the line {line!r}, found {names}: bring tests/broken_rules.py in line"
        )
    return found[0]


def first_failure_when_broken(root: Path, line: str, wrong: str, tests: tuple[str, ...]) -> str:
    """Break the line, and return the first test that fails, or an empty string."""
    path = file_of(line, texts_of(root))
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(line, wrong, 1), encoding="utf-8")
    try:
        return first_failure(root, "not slow", tests) or first_failure(root, "slow", tests)
    finally:
        path.write_text(text, encoding="utf-8")


def first_failure(root: Path, marks: str, tests: tuple[str, ...]) -> str:
    """Return the first failing test among those with the marks, or an empty string."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", marks, "-p", "no:cacheprovider", *tests],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    failed = [row.split()[1] for row in run.stdout.splitlines() if row.startswith("FAILED ")]
    # An import error says nothing about the rule. A file without tests of these marks selects no tests.
    if bool(run.returncode) != bool(failed) and run.returncode != pytest.ExitCode.NO_TESTS_COLLECTED:
        raise SystemExit(run.stdout[-2000:] + run.stderr)
    return failed[0] if failed else ""


def main(words: list[str]) -> int:
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, root / name, symlinks=True)
            else:
                shutil.copy(ROOT / name, root / name)
        for what, line, wrong, tests in BROKEN:
            if words and not any(word in what for word in words):
                continue
            found = first_failure_when_broken(root, line, wrong, tests)
            missed += not found
            print(f"{what}: {found or 'NOT NOTICED'}", flush=True)  # noqa: T201
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
