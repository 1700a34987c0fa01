"""`check` of a module names the faulty submodule and the fault inside it."""

import copy
import functools
import inspect
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from faulty_modules import Applied, Counter, CutSquare, DoubledTangent, Gate, Language, Square, Twice
from torch import nn

import hodiff
from hodiff import InputError, check
from hodiff.checks.pipelines import fault_search as faults

X = torch.tensor([[0.5, -1.2, 2.0, 0.3], [1.1, 0.4, -0.7, 0.9], [-0.2, 0.8, 1.6, -1.4]])
REVERSE_INSIDE = {"reverse-over-reverse", "forward-over-reverse"}
FORWARD_INSIDE = {"reverse-over-forward", "forward-over-forward"}


TOKENS = torch.tensor([[1, 2, 3]])
MASK = torch.full((3, 3), -torch.inf).triu(1)


def cross_entropy(output):
    return F.cross_entropy(output["logits"][0], torch.tensor([1, 2, 0]))


RIGHT = {
    "layers": (lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.GELU()), (X,), {}),
    "a loss": (Language, (TOKENS, MASK), {"loss": cross_entropy}),
    "tokens alone": (lambda: Language(lambda: nn.LayerNorm(4)), (TOKENS,), {}),
    "several outputs and a shared submodule": (lambda: Twice(nn.Softplus()), (X,), {}),
    "a custom Function": (lambda: nn.Sequential(nn.Linear(4, 4), Applied(Square)), (X,), {"order": 3}),
    "kinks elsewhere, in place": (lambda: nn.Sequential(nn.Linear(4, 9), nn.ReLU(inplace=True)), (X,), {}),
    "evaluation mode": (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)).eval(), (X,), {}),
    "a constant changed in place": (Counter, (X, torch.tensor(2)), {}),
    "training without a state": (lambda: nn.BatchNorm1d(4, track_running_stats=False), (X,), {}),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", RIGHT)
def test_right_module_passes_by_every_route(name):
    make, inputs, options = RIGHT[name]
    report = check(make(), inputs, **options)
    assert report.ok, str(report)
    assert {entry.status for entry in report.entries} == {"ok"}
    assert set(hodiff.ROUTES) <= {entry.route for entry in report.entries}


def normalized():
    inner = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    return nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"body": inner})["body"], nn.Tanh(), nn.LayerNorm(4))


NORM, BATCH = "torch.nn.functional.layer_norm", "torch.nn.functional.batch_norm"
# Module factory, inputs, options, faulty submodule, other text of the evidence, code, routes
WRONG = {
    "torch's layer_norm": (normalized, (X,), {"correct": False}, "1.1 (LayerNorm)", NORM, "HD406", FORWARD_INSIDE),
    "in a list": (
        lambda: Language(lambda: nn.LayerNorm(4)),
        (TOKENS, MASK),
        {"correct": False, "loss": cross_entropy},
        "blocks.0.norm (LayerNorm)",
        NORM,
        "HD406",
        FORWARD_INSIDE,
    ),
    "the whole": (
        lambda: nn.BatchNorm1d(4, track_running_stats=False),
        (X,),
        {"correct": False},
        "the module itself, BatchNorm1d",
        BATCH,
        "HD406",
        FORWARD_INSIDE,
    ),
    "a Function": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), Applied(CutSquare)), nn.Linear(4, 4)),
        (X,),
        {},
        "1.1 (Applied)",
        "",
        "HD104",
        REVERSE_INSIDE,
    ),
    "a shared Function": (lambda: Twice(Applied(CutSquare)), (X,), {}, "first (Applied)", "", "HD104", REVERSE_INSIDE),
    "a tangent": (lambda: Twice(Applied(DoubledTangent)), (X,), {}, "first (Applied)", "", "HD102", {"forward"}),
    "its own forward": (
        lambda: nn.Sequential(nn.Tanh(), Gate()),
        (X,),
        {},
        "1 (Gate)",
        "torch.Tensor.detach",
        "HD104",
        {"reverse", "forward"},
    ),
    "the loss": (
        lambda: nn.Linear(4, 4),
        (X,),
        {"loss": lambda y: CutSquare.apply(y).sum()},
        "the loss",
        "",
        "HD104",
        REVERSE_INSIDE,
    ),
    "a kink": (
        lambda: nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU()),
        (0 * X,),
        {},
        "1 (ReLU)",
        "",
        "HD901",
        set(),
    ),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", WRONG)
def test_finding_names_the_wrong_submodule(name):
    make, inputs, options, submodule, inside, code, routes = WRONG[name]
    report = check(make(), inputs, **options)
    assert not report.ok
    assert report.codes[0] == code, str(report)
    finding = report.findings[0]
    assert submodule in finding.evidence[0], str(report)
    assert submodule.removeprefix("the module itself, ") in finding.cause
    assert any(inside in each for each in finding.evidence), str(report)
    assert routes <= set(finding.route.split(", ")), str(report)


@pytest.mark.slow
def test_finding_names_the_line_and_repeated_modules():
    first = check(normalized(), X, correct=False).findings[0]
    assert first.location.startswith("normalization.py:")
    assert "the same module is also 3" in first.evidence
    assert "hodiff.corrected()" in first.remedy
    assert check(nn.Sequential(nn.Tanh(), Gate()), X).findings[0].location.startswith("faulty_modules.py:")


@pytest.mark.slow
def test_findings_name_the_first_submodule_of_each_kind():
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), Applied(CutSquare), nn.LayerNorm(4))
    report = check(module, X, correct=False)
    assert list(dict.fromkeys(finding.evidence[0] for finding in report.findings)) == [
        "submodule 1 (LayerNorm)",
        "submodule 2 (Applied)",
    ]


UNSTEADY = {
    "dropout": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Dropout(0.5))),
        "1.1 (Dropout)",
        "different outputs",
    ),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "1 (BatchNorm1d)", "running_mean"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", UNSTEADY)
def test_state_that_changes_between_calls_is_restored(name):
    make, submodule, word = UNSTEADY[name]
    report = check(make(), X)
    assert report.ok, str(report)
    (note,) = [note for note in report.notes if "every call began in the same state" in note]
    assert submodule in note
    assert word in note


def test_unrestorable_state_is_the_only_finding():
    calls = []

    class Counts(nn.Module):
        def forward(self, x):
            calls.append(len(calls))
            return x * len(calls)

    report = check(nn.Sequential(nn.Linear(4, 4), Counts()), X)
    assert report.codes == ("HD903",)
    assert "1 (Counts)" in report.findings[0].cause
    assert not report.entries


class Coarse(nn.Module):
    def forward(self, x):
        return x.float().exp()


def test_module_that_lowers_precision_is_judged_in_float64():
    report = check(nn.Sequential(nn.Linear(4, 4), Coarse(), nn.Tanh()), X)
    assert report.ok, str(report)
    assert max(entry.tolerance for entry in report.entries) < 1e-6
    assert "inside: Coarse.forward; judged in float64" in report.notes[-1]


def test_module_for_float32_only_is_checked_in_float32():
    class Single(nn.Module):
        def forward(self, x):
            assert x.dtype == torch.float32
            return x.exp()

    report = check(nn.Sequential(nn.Linear(4, 4), Single()), X.float())
    assert report.ok, str(report)
    assert "float32[3, 4]" in report.title
    assert report.notes[-1] == "computes in float32; comparisons are as coarse"


class OnItsClass(nn.Module):
    """Counts its calls and keeps its last output on the class; also sets the default dtype."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        torch.set_default_dtype(torch.float64)
        OnItsClass.calls += 1
        OnItsClass.last = self.linear(x) * OnItsClass.calls
        return OnItsClass.last.tanh()


def test_state_outside_the_module_is_restored():
    report = check(OnItsClass(), torch.ones(2, 3))
    assert report.ok, str(report)
    assert "every call began in the same" in " ".join(str(report).split())
    assert OnItsClass.calls == 0
    assert not hasattr(OnItsClass, "last")
    assert torch.get_default_dtype() is torch.float32


def test_inputs_that_a_module_keeps_are_forgotten_between_calls():
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.last = None
            self.history = []

        def forward(self, x):
            if self.last is not None:
                x = x + 0.1 * self.last + 0.1 * sum(self.history)
            self.last = self.linear(x)
            self.history.append(self.last)
            return self.last.tanh()

    module = Remembers()
    module(X)  # the module now holds a tensor with a graph
    report = check(module, X)
    assert report.ok, str(report)


def test_cache_argument_does_not_grow_between_calls():
    class Cache:
        def __init__(self):
            self.seen = []

    class Appends(nn.Module):
        def forward(self, x, cache):
            cache.seen.append(x)
            return torch.cat(cache.seen).sum(0) * x.detach().square()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.appends = Appends()

        def forward(self, x):
            return self.appends(x, Cache())

    report = check(Model(), X)
    assert report.codes == ("HD104",), str(report)
    assert "appends (Appends)" in report.findings[0].cause


class OldSine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()


def test_legacy_function_is_right_by_reverse_passes():
    report = check(nn.Sequential(nn.Linear(4, 4), Applied(OldSine)), X)
    assert report.ok
    assert report.codes == ("HD405",)
    assert report.warnings[0].location.startswith("tests/checks/pipelines/test_check_module.py")
    right = {entry.route for entry in report.entries if entry.status == "ok"}
    assert right == {"reverse", "reverse-over-reverse"}


def test_wrong_legacy_function_is_found():
    class Wrong(OldSine):
        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * x.detach().cos()

    report = check(nn.Sequential(nn.Linear(4, 4), Applied(Wrong)), X)
    assert "HD104" in [each.code for each in report.errors], str(report)


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=4)


@pytest.mark.slow
def test_complex_parameters_are_differentiated():
    report = check(nn.Sequential(Spectral(), nn.Tanh()), X)
    assert report.ok, str(report)
    assert report.notes[0] == "differentiated by 6 numbers in parameters and 12 in inputs"
    wrong = check(nn.Sequential(Spectral(), Applied(CutSquare)), X)
    assert not wrong.ok


@pytest.mark.slow
def test_module_and_random_state_are_left_unchanged():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    before, state, x = copy.deepcopy(module.state_dict()), torch.get_rng_state(), X.clone().requires_grad_()
    hooks = len(module._forward_hooks)
    check(module, x)
    check(module.eval(), x)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert all(parameter.grad is None for parameter in module.parameters())
    assert x.grad is None
    assert hooks == len(module._forward_hooks)


def test_frozen_parameters_are_not_differentiated():
    module = Language()
    module.blocks.requires_grad_(False)
    report = check(module, TOKENS)
    assert report.ok
    assert "28 numbers in parameters and 0 in inputs; 40 in frozen parameters" in report.notes[0]


def test_seed_determines_the_report():
    module = normalized()
    first, again, other = (check(module, X, order=1, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.entries != other.entries


@pytest.mark.parametrize(
    ("module", "inputs", "options", "message"),
    [
        (nn.Linear(3, 2), X, {}, "expected Linear.* to run, but Linear raised RuntimeError"),
        (nn.Sequential(nn.Tanh(), nn.Linear(3, 2)), X, {}, r"but 1 \(Linear\) raised"),
        (nn.Linear(4, 2), X, {"order": 0}, "check: order: expected an int of 1 or more, got 0"),
        (nn.Linear(4, 2), X, {"loss": X}, "check: loss: expected a function .* got Tensor"),
        (
            nn.Linear(4, 2),
            X,
            {"loss": torch.abs},
            r"loss: expected a floating scalar, got torch.float64 of shape \(3, 2\)",
        ),
        (nn.Linear(4, 2), X, {"loss": lambda y: y @ X}, "check: loss: .* raised RuntimeError"),
        (nn.Linear(4, 2), X, {"wrt": "weights"}, "check: wrt: expected"),
        (nn.Embedding(3, 2).requires_grad_(False), torch.tensor([1]), {}, "expected a parameter that requires grad"),
    ],
)
def test_rejects_bad_arguments(module, inputs, options, message):
    with pytest.raises(InputError, match=message):
        check(module, inputs, **options)


class Residual(nn.Module):
    """Residual of a differential equation, as in physics-informed networks."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x):
        x = x.clone().requires_grad_()
        u = self.net(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (curvature,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
        return curvature[:, 0] - slope[:, 1] + u[:, 0] ** 3


class Penalty(Residual):
    """Penalty on a critic's gradient."""

    def forward(self, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return ((slope.norm(dim=1) - 1) ** 2).mean()


class Forces(Residual):
    """Forces of an energy, by positions that are a new leaf."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        return -torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]


class Slopes(Residual):
    def forward(self, x):
        return torch.func.vmap(torch.func.grad(lambda each: self.net(each).sum()))(x)


class Islands(nn.Module):
    """Normalizes in float32 inside a float64 model, as Llama and T5 do."""

    def forward(self, x):
        x32 = x.to(torch.float32)
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=True).eval()


PADDED = torch.tensor([[False, False, False], [False, True, True]])
SEQUENCES = torch.stack([X, X.flip(0)])
ROWS = torch.tensor([[0, 1, 2], [3, 0, 5]])
# Common models, and the codes that a check may report
USUAL = {
    "a residual": (Residual, X[:, :2], {"HD410"}),
    "a penalty": (Penalty, X[:, :2], {"HD410"}),
    "gradients of a batch": (Slopes, X[:, :2], set()),
    "float32 inside": (lambda: nn.Sequential(nn.Linear(4, 3), Islands(), nn.Linear(3, 2), nn.Tanh()), X, set()),
    "padding in an embedding": (
        lambda: nn.Sequential(nn.Embedding(6, 4, padding_idx=0), nn.LayerNorm(4)),
        ROWS,
        {"HD410"},
    ),
    "padded sequences": (encoder, (SEQUENCES, None, PADDED), {"HD410"}),
    "a recurrent network": (lambda: nn.LSTM(4, 3, 2, batch_first=True), SEQUENCES, set()),
    "sums of large numbers": (lambda: Cancels(), X, set()),
}


class Cancels(nn.Module):
    def forward(self, x):
        return ((x + 1e6) - 1e6) ** 2


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", USUAL)
def test_common_modules_are_not_called_wrong(name):
    make, inputs, codes = USUAL[name]
    torch.manual_seed(0)
    report = check(make(), inputs)
    assert report.ok, str(report)
    assert set(report.codes) == codes, str(report)


@pytest.mark.slow
def test_forces_by_a_new_leaf_pass_for_parameters_only():
    """The new leaf makes the forces a constant of the input; nothing is cut between parameters and forces."""
    report = check(Forces(), X[:, :2], wrt="parameters")
    assert (report.ok, report.codes) == (True, ("HD410",)), str(report)
    assert not check(Forces(), X[:, :2]).ok


@pytest.mark.slow
def test_note_names_submodules_in_float32():
    make, inputs, _ = USUAL["float32 inside"]
    assert "computes in a lower precision inside: Islands.forward" in check(make(), inputs).notes[1]
    make, inputs, _ = USUAL["padding in an embedding"]
    assert "padding_idx" in check(make(), inputs).notes[0]


@pytest.mark.slow
def test_wrong_rule_beside_float32_is_found():
    """Coarse comparisons detect errors larger than rounding."""
    module = nn.Sequential(nn.Linear(4, 3), Islands(), Applied(CutSquare))
    assert not check(module, X).ok


WRT = {"both": (29, 12), "parameters": (29, 0), "inputs": (0, 12)}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("wrt", WRT)
def test_wrt_selects_what_is_differentiated(wrt):
    module = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    report = check(module, X, wrt=wrt)
    assert report.ok
    assert report.notes[0] == "differentiated by {} numbers in parameters and {} in inputs".format(*WRT[wrt])
    assert report.codes == ("HD410",)
    assert "torch.nn.functional.layer_norm" in report.findings[0].evidence[0]


class Compares(nn.Module):
    """Accepts its own points only, as a Gaussian process does in training."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("points", X.clone())

    def forward(self, points, factor):
        if not torch.equal(points.detach(), self.points):
            raise RuntimeError("You must train on the training inputs!")
        return points * self.scale.exp() * factor


@pytest.mark.slow
def test_fixed_inputs_are_not_moved():
    report = check(Compares(), (X, torch.tensor(2.0)), fixed=(0,))
    assert report.ok, str(report)
    assert report.notes[0] == "differentiated by 4 numbers in parameters and 1 in inputs"
    assert not check(Compares(), (X, torch.tensor(2.0))).ok


@pytest.mark.parametrize("options", [{"wrt": "parameters"}, {"fixed": (0,)}])
def test_function_rejects_options_of_modules(options):
    with pytest.raises(InputError, match=r"check: (wrt|fixed): expected nothing for a function"):
        check(torch.sin, X, **options)


def test_loss_with_reference_is_rejected():
    with pytest.raises(InputError, match="check: reference: expected None with a loss"):
        check(nn.Linear(4, 2), X, loss=torch.sum, reference=nn.Linear(4, 2))


class Rounds(nn.Module):
    def __init__(self, straight):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.round = hodiff.straight_through(torch.round, lambda x: x) if straight else None

    def forward(self, x):
        if self.round is not None:
            return self.layer(self.round(3 * x))
        return F.linear(x, self.layer.weight + (self.layer.weight.round() - self.layer.weight).detach())


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("straight", [True, False])
def test_rounding_with_and_without_straight_through_is_a_note(straight):
    report = check(Rounds(straight), X, approximate=not straight)
    assert report.ok, str(report)
    assert "HD902" in report.codes
    assert "10 numbers in parameters and 12 in inputs" in report.notes[-1]
    assert "Rounds at" in report.title


def test_unknown_output_type_asks_for_a_loss():
    class Output:
        logits = X

    with pytest.raises(InputError, match="pass a loss that returns a tensor"):
        check(Gives(Output()), X)


class Gives(nn.Linear):
    def __init__(self, output):
        super().__init__(4, 2)
        self.output = output

    def forward(self, x):
        return self.output


@pytest.mark.slow
def test_compiled_module_is_compared():
    report = check(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), X, compile="aot_eager")
    assert "compile" in {entry.route for entry in report.entries}
    assert report.ok, str(report)


class Unsteady:
    """Correct modules for which a check adds a note."""

    class Hooked(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.weight.register_hook(lambda g: 3 * g)

    class Holds(nn.Linear):
        """Holds tensors that are neither parameters nor buffers."""

        def __init__(self):
            super().__init__(4, 4)
            self.others = [torch.randn(4, 4, requires_grad=True)]
            self.constant = torch.randn(4, 4)

        def forward(self, x):
            return super().forward(x) @ self.others[0] @ self.constant

    class Asks(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)

        def forward(self, x):
            y = super().forward(x)
            return y.tanh() if torch.is_grad_enabled() else y.sin()

    class Draws(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.generator = torch.Generator().manual_seed(1)

        def forward(self, x):
            return super().forward(x) * torch.rand(4, generator=self.generator)


NOTED = {
    "Hooked": "hooks on gradients of parameters do not run: hooks of weight",
    "Holds": "requires a gradient and is no parameter, so a constant here: others",
    "Asks": "computes something else under torch.no_grad()",
    "Draws": "here every call began in the same state",
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NOTED)
def test_unsteady_behaviour_is_noted(name):
    report = check(getattr(Unsteady, name)(), X)
    assert report.ok, str(report)
    assert any(NOTED[name] in note for note in report.notes), report.notes
    assert max(entry.tolerance for entry in report.entries) < 1e-6


class Opaque:
    def __init__(self, state):
        self.state = state


def test_opaque_outputs_are_noted():
    class Pair(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y.tanh(), Opaque(y.detach())

    report = check(Pair(4, 4), X)
    assert "of the output, Opaque is not looked into" in report.notes[-1]


@pytest.mark.slow
def test_grad_mode_that_a_module_switches_off_is_restored():
    class Off(nn.Linear):
        def forward(self, x):
            torch.set_grad_enabled(False)
            return super().forward(x)

    assert not check(Off(4, 4), X).ok
    torch.set_grad_enabled(True)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    assert check(module, X).ok
    x = torch.tensor([0.5, -1.0], dtype=torch.float64)
    with hodiff.corrected():
        slope = torch.func.grad(lambda x: torch.func.jvp(lambda x: x.pow(3).sum(), (x,), (x,))[1])
        torch.testing.assert_close(slope(x), 9 * x**2)


def test_numpy_and_python_random_state_and_lazy_modules_are_unchanged():
    class Draws(nn.Linear):
        def forward(self, x):
            return super().forward(x) * np.random.rand() * random.random()  # noqa: NPY002

    before, python = np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    for look in (check, hodiff.preflight):
        look(Draws(4, 4), X)
        assert (np.random.get_state()[1] == before).all()  # noqa: NPY002
        assert random.getstate() == python
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Tanh())
    hodiff.preflight(lazy, X)
    assert lazy[0].in_features == 0


def test_rejects_scripted_modules_and_bad_fixed_positions():
    with pytest.raises(InputError, match="scripted or traced"):
        check(torch.jit.script(nn.Linear(4, 2)), X)
    for fixed in ((1,), (-1,), ("x",), 0):
        with pytest.raises(InputError, match="check: fixed: expected a tuple of positions of the 1 inputs"):
            check(nn.Linear(4, 2), X, fixed=fixed)
    with pytest.raises(InputError, match="preflight: model_or_function: expected Linear to run"):
        hodiff.preflight(nn.Linear(4, 2))


def test_sparse_inputs_are_not_differentiated():
    class Layer(nn.Linear):
        def forward(self, x):
            return torch.sparse.mm(x, self.weight.t()).tanh()

    report = check(Layer(4, 2), X.to_sparse())
    assert report.ok
    assert report.codes == ("HD406",)


@pytest.mark.slow
def test_cut_graph_is_located_at_its_line():
    """The finding names the module's line, although a check copies the arguments."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            y = self.linear(x).tanh()
            with torch.no_grad():
                size = y.norm()
            return y / size

    report = check(Normed(), X)
    (finding,) = report.errors
    assert finding.code == "HD104"
    assert "calls torch.no_grad" in finding.cause
    line = Normed.forward.__code__.co_firstlineno + 2
    assert finding.location.endswith(f"test_check_module.py:{line}")


class Hooked(nn.Linear):
    def forward(self, x):
        y = super().forward(x).tanh()
        if y.requires_grad:
            y.register_hook(lambda g: 2 * g)
        return y


class OfAParameter(nn.Linear):
    def forward(self, x):
        return nn.Parameter(super().forward(x)) ** 2


@pytest.mark.parametrize(
    ("module", "code", "words"),
    [(Hooked, "HD101", "calls register_hook"), (OfAParameter, "HD104", "a leaf of its own of shape (3, 2)")],
    ids=["a hook", "a leaf"],
)
def test_hooks_and_other_hidden_gradient_changes_are_named(module, code, words):
    (finding,) = check(module(4, 2), X, order=1).errors
    assert finding.code == code
    assert words in finding.cause


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # raised for a copy of a script
def test_scripted_submodules_pass():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.jit.script(torch.nn.LayerNorm(3))
            self.head = torch.nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.norm(x)).tanh()

    assert check(Net(), torch.randn(5, 3)).ok


@pytest.mark.slow
def test_backward_hooks_are_noted():
    """Backward hooks explain why reverse passes disagree with all other derivatives."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    model[1].register_full_backward_hook(lambda module, gradients, _: (2 * gradients[0],))
    report = check(model, X)
    assert not report.ok
    assert any("backward hooks change gradients" in note and "modules 1;" in note for note in report.notes)


class Keeping(nn.Module):
    """Computes a value once and caches it, in the given way."""

    def __init__(self, way):
        super().__init__()
        self.weight, self.way, self.kept = nn.Parameter(torch.eye(3) + 0.1), way, {}

    @functools.lru_cache  # noqa: B019 (as users do)
    def cached(self):
        return self.weight.exp()

    def forward(self, x):
        if self.way == "lru_cache":
            return x.tanh() @ self.cached()
        key = len(x) if self.way == "sizes" else "value"
        values = {
            "result": self.weight.exp,
            "constant": self.weight.detach().exp,
            "of inputs": lambda: x.mean() * self.weight,
            "sizes": lambda: torch.ones(len(x), 3, dtype=x.dtype),
        }
        if key not in self.kept:
            self.kept[key] = values[self.way]()
        return x.tanh() @ (self.weight if self.way == "sizes" else self.kept[key])


@pytest.mark.parametrize("way", ["result", "constant", "of inputs", "lru_cache"])
def test_result_kept_from_an_earlier_call_is_an_error(way):
    model = nn.Sequential(nn.Linear(3, 3), Keeping(way))
    (finding,) = check(model, torch.ones(2, 3)).findings
    assert (finding.code, finding.evidence[0]) == ("HD310", "submodule 1 (Keeping)")
    assert model[1].kept == {}


def test_result_kept_from_before_the_check_is_an_error():
    model = Keeping("result")
    model(torch.ones(2, 3))
    assert check(model, torch.ones(2, 3)).codes == ("HD310",)


def test_cache_by_size_is_no_error():
    model = Keeping("sizes")
    model(torch.ones(2, 3))
    assert check(model, torch.ones(2, 3)).codes == ()


class Decorated(nn.Module):
    @torch.no_grad()
    def forward(self, x):
        return x.exp()


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.decorated = nn.Linear(3, 3), Decorated()

    def forward(self, x):
        return self.linear(x) * self.decorated(self.linear(x))


@pytest.mark.slow
def test_cutting_decorator_is_located_at_the_decorated_function():
    line = inspect.getsourcelines(Decorated.forward)[1]
    (finding,) = check(Weighted(), torch.ones(2, 3)).findings
    assert (finding.code, finding.location) == ("HD104", f"tests/checks/pipelines/test_check_module.py:{line}")


class Detaching(nn.Linear):
    def forward(self, x):
        return super().forward(x) * super().forward(x).detach()


@pytest.mark.slow
def test_remedy_does_not_repeat_the_options_given():
    advised = check(Detaching(3, 3), torch.ones(2, 3)).findings[0].remedy
    assert "wrt=" in advised
    taken = check(Detaching(3, 3), torch.ones(2, 3), wrt="parameters").findings[0].remedy
    assert taken == "Remove it. If it is intended, check the module around it without it."


class Otherwise(nn.Linear):
    """Rounds differently, or computes another function, if gradients are disabled."""

    other = 1e-14

    def forward(self, x):
        return super().forward(x) * (1 if torch.is_grad_enabled() else 1 + self.other)


def test_rounding_under_no_grad_is_not_reported():
    model = Otherwise(3, 3)
    assert "torch.no_grad" not in str(check(model, torch.ones(2, 3)))
    model.other = 1e-3
    assert "torch.no_grad" in str(check(model, torch.ones(2, 3)))


@pytest.mark.slow
def test_submodules_are_not_searched_if_the_whole_agrees(monkeypatch):
    seen = []

    def failures(subject, order, seed):
        seen.append(subject)
        return own(subject, order, seed)

    own = faults.failures
    monkeypatch.setattr(faults, "failures", failures)
    right = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), each) for each in (nn.Tanh(), nn.SiLU(), nn.Sigmoid())))
    report = check(nn.Sequential(Detaching(3, 3), right), torch.ones(2, 3))
    assert report.codes[0] == "HD104", str(report)
    # One call is for the faulty part, and one for the correct part as a whole.
    assert len(seen) == 2


def test_summary_names_the_disagreement():
    assert "differences disagree by" in check(Detaching(3, 3), torch.ones(2, 3)).summary


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_are_no_arguments_of_the_function_at_fault(training):
    """Torch raises for derivatives by `running_mean`, which nobody takes."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh()).double().train(training)
    text = " ".join(str(check(model, X[:, :2], vmap=False, scipy=False)).split())
    assert "running_mean'" not in text
    if training:
        assert "batch_norm: reverse-over-forward, forward-over-forward: relative error" in text
