"""The functions that examples differentiate pass hodiff's check, including gradgradcheck and SciPy's Hessian."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def few_shot(example: ModuleType) -> str:
    generator = torch.Generator().manual_seed(0)
    tasks = example.draw_tasks(example.make_shapes(range(7)), 1, 1, generator)
    return example.check(example.LEARNERS["MAML"](example.make_network(generator)), tasks)


def ridge(example: ModuleType) -> str:
    return example.check(*([each.double() for each in part] for part in example.make_data(1)))


def natural(example: ModuleType) -> str:
    data = example.Digits.load(0)
    return example.check(4, data.images[:100], data.labels[:100], 0)


def influence(example: ModuleType) -> str:
    return example.check(torch.zeros(65, 10, dtype=torch.float64), example.load_images(100, 0)[0], 0.01)


def laplace(example: ModuleType) -> str:
    torch.manual_seed(0)
    network = torch.nn.Linear(64, example.SHOWN).double()
    return example.check(network, example.load_images(80, 0)[0])


# Each example's own check returns one line, or several.
CHECKS: dict[str, Callable[[ModuleType], str | list[str]]] = {
    "constrained": lambda example: example.check_first(example.make_problems(40, 0)),
    "data_cleaning_digits": lambda example: example.check_losses(
        example.load(example.parse_options(["--quick"]))[0], 0
    ),
    "distillation_digits": lambda example: example.check(example.load()[0], 0),
    "few_shot_digits": few_shot,
    "gpt_hessian": lambda example: example.check(),
    "imaml_memory": lambda example: example.check(0),
    "influence_digits": influence,
    "laplace": laplace,
    "mean_flow_digits": lambda example: example.check(),
    "test_time_training": lambda example: example.check(),
    "lennard_jones_forces": lambda example: example.check(),
    "maml_sinusoid": lambda example: example.check_second_order(5, 0),
    "minimal_surface": lambda example: example.check(),
    "natural_gradient": natural,
    "newton_in_two_dimensions": lambda example: example.check(),
    "ode_taylor": lambda example: example.check(),
    "pinn_poisson": lambda example: example.check(),
    "pruning_digits": lambda example: example.check(4, 0.0),
    "elastic_constants": lambda example: example.check(),
    "hessian_training": lambda example: example.check(),
    "molecular_vibrations": lambda example: example.check(),
    "ridge_hyperparameters": ridge,
    "riemannian_hmc": lambda example: example.check(),
    "trajectory": lambda example: example.check(),
    "variational_monte_carlo": lambda example: example.check(),
    "vibrational_modes": lambda example: example.check(),
    "sine_gordon_100d": lambda example: example.check(),
}
SLOW = {
    "constrained",
    "distillation_digits",
    "few_shot_digits",
    "gpt_hessian",
    "imaml_memory",
    "mean_flow_digits",
    "test_time_training",
    "lennard_jones_forces",
    "maml_sinusoid",
    "ode_taylor",
    "pinn_poisson",
    "riemannian_hmc",
    "sine_gordon_100d",
}
# These examples check within their run, which their slow tests read.
IN_THEIR_RUN = {
    "constrained_design",
    "digits_hessian",
    "digits_optimizers",
    "distributed_hessian",
    "edge_of_stability",
    "influence_compared",
    "ode_parameters",
    "poisson_network",
    "sharded_language_model",
}
WITHOUT = {
    "gaussian_process": "it needs GPyTorch, and is tested by `make test-doors`",
    "quantized_digits": "its derivatives are those of a surrogate",
    "transition_state": "it needs ASE and Sella, and is tested by `make test-doors`",
}


def test_every_example_is_listed() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*CHECKS, *IN_THEIR_RUN, *WITHOUT}
    for name in CHECKS.keys() | IN_THEIR_RUN:
        assert "assert_differentiable(" in (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CHECKS]
)
def test_check_of_the_example_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    found = CHECKS[name](importlib.import_module(name))
    for line in [found] if isinstance(found, str) else found:
        assert ": ok" in line
        assert "gradcheck passes, gradgradcheck passes" in line
        distances = re.findall(r"agree to (\S+),", line)
        assert len(distances) == 2, line
        assert all(float(distance) < 1e-3 for distance in distances), line
