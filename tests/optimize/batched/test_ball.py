"""Tests of minimizers of quadratic models in a ball (trust-region subproblems), by their optimality conditions."""

import numpy as np
import pytest
import torch

from hodiff.optimize.batched.trust_exact import steps_in_balls

D = torch.float64
EYE = np.eye(3)
MODELS = {
    "newton's step": (np.diag([1.0, 2.0, 5.0]), [0.1, 0.1, 0.1], 1.0),
    "convex, at the boundary": (np.diag([1.0, 2.0, 5.0]), [3.0, -1.0, 2.0], 1.0),
    "badly conditioned": (np.diag([1e-9, 1.0, 1e9]), [1.0, 1.0, 1.0], 0.5),
    "indefinite": (np.diag([-3.0, 1.0, 2.0]), [0.5, 1.0, -2.0], 2.0),
    "hard case": (np.diag([-3.0, 1.0, 2.0]), [0.0, 0.1, -0.2], 2.0),
    "hard case, twice": (np.diag([-3.0, -3.0, 2.0]), [0.0, 0.0, -0.2], 2.0),
    "nearly the hard case": (np.diag([-3.0, 1.0, 2.0]), [1e-14, 0.1, -0.2], 2.0),
    "a saddle without a slope": (np.diag([-1.0, 1.0, 2.0]), [0.0, 0.0, 0.0], 0.25),
    "singular": (np.diag([0.0, 1.0, 2.0]), [0.0, 1.0, 1.0], 5.0),
    "no curvature": (0 * EYE, [3.0, 0.0, 4.0], 2.0),
    "concave": (-EYE, [0.3, 0.4, 0.0], 1e-3),
}


def in_another_basis(matrix, gradient):
    """Transform a quadratic model into another basis."""
    q, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))
    return q @ matrix @ q.T, q @ np.array(gradient)


@pytest.mark.parametrize("basis", ["own", "turned"])
def test_steps_satisfy_the_optimality_conditions(basis):
    """Steps satisfy (H + s) p = -g, H + s positive semidefinite, s >= 0, and s = 0 inside (Moré & Sorensen, 1983)."""
    models = [(*(in_another_basis(h, g) if basis == "turned" else (h, np.array(g))), r) for h, g, r in MODELS.values()]
    h, g, r = (torch.from_numpy(np.stack([model[i] for model in models])).to(D) for i in range(3))
    found = steps_in_balls(h, g, r)
    for name, (matrix, gradient, radius), p, change, bounded in zip(
        MODELS, models, found.step.numpy(), found.change.tolist(), found.bounded.tolist(), strict=True
    ):
        size = np.abs(matrix).max() + np.linalg.norm(gradient) / radius
        norm = np.linalg.norm(p)
        assert norm <= radius * (1 + 1e-9), name
        shift = -(p @ (matrix @ p + gradient)) / norm**2
        assert shift >= -1e-9 * size, name
        np.testing.assert_allclose((matrix + shift * EYE) @ p, -gradient, atol=2e-6 * size * norm, err_msg=name)
        assert np.linalg.eigvalsh(matrix)[0] + shift >= -1e-8 * size, name
        assert bounded == (norm > radius * (1 - 1e-8)), name
        assert bounded or abs(shift) <= 1e-9 * size, name
        assert change == pytest.approx(gradient @ p + p @ matrix @ p / 2, rel=1e-6, abs=1e-15), name
