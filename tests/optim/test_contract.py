"""Tests of the contract of `torch.optim.Optimizer` for every optimizer of hodiff."""

import copy
import io
import itertools
import pickle
from functools import cache, partial

import pytest
import torch
from optim.table import TABLE, Case, Problem, cross_entropy, same
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import hodiff

D = torch.float64
every = pytest.mark.parametrize("case", TABLE.values(), ids=TABLE)


def optimizers_with(**promises):
    """Parametrize by the optimizers with these properties."""
    kept = {name: case for name, case in TABLE.items() if all(getattr(case, k) == v for k, v in promises.items())}
    return pytest.mark.parametrize("case", kept.values(), ids=kept)


@pytest.mark.parametrize("name", ["KFAC", "EKFAC", "SophiaH", "Shampoo", "SAM", "NewtonCG", "HessianFree", "LBFGS"])
@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))])
def test_a_module_is_refused_with_the_remedy(name, model):
    with pytest.raises(hodiff.InputError, match=rf"^{name}: params: .* module .*; pass model.parameters\(\).$"):
        getattr(hodiff.optim, name)(model)


def quadratic(case, parameters, scale=1.0):
    """Return a closure of the separable loss (p - 1)^2 for any parameters."""

    def terms():
        return torch.cat([(p - 1).abs().square().double().reshape(-1) for p in parameters])

    if case.pair:
        return lambda: (
            torch.cat([(p - 1).double().reshape(-1) for p in parameters]),
            lambda z: scale * z.square().sum(),
        )
    if case.make is hodiff.optim.SophiaG:
        # Two classes, of which the first is always correct: a cross-entropy that depends on every parameter.
        return lambda: (
            scale
            * cross_entropy(
                torch.stack([torch.cat([p.double().reshape(-1) for p in parameters])] * 2, 1)
                * torch.tensor([1.0, -1.0]),
                torch.zeros(sum(p.numel() for p in parameters), dtype=torch.long),
                reduction="sum",
            )
        )
    return lambda: scale * terms().sum()


@pytest.mark.one_in(3)
@every
def test_training_lowers_the_loss_and_sets_grad(case):
    problem = Problem()
    whole = problem.batches[0]
    before = problem.loss(whole).item()
    problem.run(case, case(problem.model.parameters()), [whole] * 12)
    assert problem.loss(whole).item() < before - 0.05
    assert all(p.grad is not None for p in problem.model.parameters())


@optimizers_with(backward=True)
def test_both_closure_forms_and_the_plain_loop_agree(case):
    problem, again, loop = Problem(), Problem(), Problem()
    ours, theirs = case(problem.model.parameters()), case(again.model.parameters())
    for batch in problem.batches:
        first = ours.step(lambda: problem.loss(batch))

        def closure():
            theirs.zero_grad()
            loss = again.loss(batch)
            loss.backward()
            return loss

        assert torch.equal(first, theirs.step(closure).detach())
    assert same(problem.numbers(), again.numbers())
    if case.loop:
        loop.run(case, case(loop.model.parameters()))
        assert same(problem.numbers(), loop.numbers())


@pytest.mark.one_in(3)
@every
def test_state_dict_resumes_training_in_another_process(case):
    problem = Problem()
    optimizer = case(problem.model.parameters())
    problem.run(case, optimizer, problem.batches[:5])
    stored = io.BytesIO()
    torch.save(optimizer.state_dict(), stored)
    stored.seek(0)
    other = problem.copy()
    loaded = case(other.model.parameters(), lr=123.0)
    loaded.load_state_dict(torch.load(stored, weights_only=True))
    problem.run(case, optimizer, problem.batches[5:])
    other.run(case, loaded, problem.batches[5:])
    assert same(problem.numbers(), other.numbers())
    ours, theirs = optimizer.state_dict(), loaded.state_dict()
    assert list(ours["state"]) == list(theirs["state"])
    assert ours["param_groups"] == theirs["param_groups"]


@pytest.mark.one_in(12)
@every
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["copy", "pickle"]
)
def test_copies_take_the_same_steps(case, copied):
    problem = Problem()
    optimizer = case(problem.model.parameters())
    problem.run(case, optimizer, problem.batches[:4])
    other, twin = copied((problem, optimizer))
    assert same(problem.run(case, optimizer), other.run(case, twin))


@pytest.mark.one_in(3)
@every
def test_learning_rate_may_be_a_tensor(case):
    problem, other = Problem(), Problem()
    rate = 0.0625
    ours = problem.run(case, case(problem.model.parameters(), lr=rate))
    theirs = other.run(case, case(other.model.parameters(), lr=torch.tensor(rate, dtype=D)))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.one_in(3)
@every
def test_schedulers_and_step_hooks_work(case):
    # torch wraps the steps of all optimizer classes in use.
    torch.optim.LBFGS([torch.ones(1, requires_grad=True)])
    problem, other = Problem(), Problem()
    optimizer, by_hand = case(problem.model.parameters()), case(other.model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    for i, batch in enumerate(problem.batches[:4]):
        problem.run(case, optimizer, [batch])
        scheduler.step()
        by_hand.param_groups[0]["lr"] = by_hand.defaults["lr"] * 0.5**i
        other.run(case, by_hand, [batch])
    assert seen == ["before", "after"] * 4
    # A line search amplifies rounding errors, and products round differently by memory address.
    torch.testing.assert_close(problem.numbers(), other.numbers(), rtol=1e-9, atol=1e-12)


@optimizers_with(maximize=True, bare=True)
def test_maximize_matches_minimizing_the_negative(case):
    options = {"maximize": True, "weight_decay": 0.01} if "SAM" not in repr(case.make) else {"maximize": True}
    ours, theirs = ([torch.tensor([0.5, 1.5], dtype=D).requires_grad_()] for _ in range(2))
    up, down = case(ours, **options), case(theirs, **{**options, "maximize": False})
    for _ in range(4):
        up.step(quadratic(case, ours, -1.0))
        down.step(quadratic(case, theirs))
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-12, atol=0)
    assert not torch.equal(ours[0], torch.tensor([0.5, 1.5], dtype=D))


@optimizers_with(apart=True)
def test_parameter_groups_match_separate_optimizers(case):
    if case.make is hodiff.optim.SophiaG:
        pytest.skip("labels are drawn for all at once")
    both = [torch.randn(3, generator=torch.Generator().manual_seed(i), dtype=D).requires_grad_() for i in range(2)]
    apart = [p.detach().clone().requires_grad_() for p in both]
    one = case([{"params": both[:1]}, {"params": both[1:], "lr": 0.2}])
    two = [case(apart[:1]), case(apart[1:], lr=0.2)]
    for _ in range(5):
        one.step(quadratic(case, both))
        for each, p in zip(two, apart, strict=True):
            each.step(quadratic(case, [p]))
    assert same(both, apart)


@optimizers_with(bare=True)
def test_layouts_dtypes_and_empty_parameters_are_accepted(case):
    strided = torch.randn(4, 6, dtype=D)[:, ::2].T.requires_grad_()
    parameters = [
        strided,
        strided.detach().contiguous().requires_grad_(),
        torch.randn(2, dtype=torch.float32, requires_grad=True),
        torch.empty(0, 3, dtype=D, requires_grad=True),
        torch.tensor(2.0, dtype=D, requires_grad=True),
    ]
    before = [p.dtype for p in parameters]
    optimizer = case(parameters)
    for _ in range(4):
        optimizer.step(quadratic(case, parameters))
    assert [p.dtype for p in parameters] == before
    assert parameters[0].stride() == strided.stride()
    assert all(p.isfinite().all() for p in parameters)
    if case.make not in (hodiff.optim.SophiaG,):
        torch.testing.assert_close(parameters[0].contiguous(), parameters[1])


@optimizers_with(bare=True)
def test_parameters_without_gradient_are_unchanged(case):
    used, unused, frozen = (torch.full((2,), 3.0, dtype=D, requires_grad=each) for each in (True, True, False))
    optimizer = case([used, unused, frozen])
    for _ in range(4):
        optimizer.step(quadratic(case, [used]))
    assert unused.tolist() == frozen.tolist() == [3.0, 3.0]
    assert not torch.equal(used, unused)


@optimizers_with(bare=True)
def test_zero_gradient_gives_zero_step(case):
    if case.make is hodiff.optim.SophiaG:
        pytest.skip("a cross-entropy has no minimum")
    at_minimum = torch.ones(3, dtype=D, requires_grad=True)
    options = {"weight_decay": 0.0} if "weight_decay" in case.options else {}
    optimizer = case([at_minimum], **options)
    for _ in range(4):
        optimizer.step(quadratic(case, [at_minimum]))
    assert at_minimum.tolist() == [1.0, 1.0, 1.0]


@every
def test_complex_parameters_match_real_pairs_or_raise(case):
    z = torch.tensor([1 + 1j, 2 - 1j], requires_grad=True)
    if not case.complex_too:
        with pytest.raises(
            hodiff.InputError, match=r"params: expected real floating-point parameters, got .* complex64"
        ):
            case([z])
        return
    pairs = torch.view_as_real(z.detach()).clone().requires_grad_()
    ours, theirs = case([z]), case([pairs])
    for _ in range(3):
        ours.step(lambda: ((z - 1).abs() ** 2).sum() + z.real.prod())
        theirs.step(lambda: ((torch.view_as_complex(pairs) - 1).abs() ** 2).sum() + pairs[:, 0].prod())
    if "adaptive" not in repr(case.make):  # the adaptive variant uses |w| of the complex number
        torch.testing.assert_close(torch.view_as_real(z), pairs, rtol=1e-5, atol=1e-6)


@optimizers_with(loop=True)
def test_sparse_gradients_are_rejected(case):
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = case(table.parameters(), **({"update_every": None} if case.watches else {}))
    cross_entropy(table(torch.tensor([0, 1])), torch.tensor([0, 1])).backward()
    with pytest.raises(hodiff.InputError, match="expected dense gradients"):
        optimizer.step()


@optimizers_with(loop=False)
def test_missing_closure_is_rejected(case):
    optimizer = case([torch.ones(2, requires_grad=True)])
    with pytest.raises(hodiff.InputError, match="step: expected a closure that computes the loss"):
        optimizer.step()


@every
def test_closure_without_loss_is_rejected(case):
    w = torch.ones(2, requires_grad=True)
    returned = [None, 3.0, w, w.detach().sum(), (w, 3.0)]
    for each in returned:
        with pytest.raises(hodiff.InputError, match=r"closure: expected|closure"):
            case([w]).step(lambda each=each: each)


class WithoutBackward:
    """A closure as Lightning's during the last pass of `StochasticWeightAveraging`, of a detached loss."""

    def __init__(self, closure, backward):
        self._closure, self._backward_fn = closure, backward

    def __call__(self):
        return self._closure().detach()


@optimizers_with(backward=True)
def test_a_detached_loss_is_rejected_unless_lightning_skips_the_backward_pass(case):
    problem = Problem()
    optimizer = case(problem.model.parameters())
    loss = partial(problem.loss, problem.batches[0])
    problem.run(case, optimizer, problem.batches[:1])
    before = [p.detach().clone() for p in problem.model.parameters()]
    # The gradients of the last batch are still there.
    value = optimizer.step(partial(lambda _, inner: inner(), optimizer, WithoutBackward(loss, None)))
    assert value.item() == pytest.approx(loss().item())
    with pytest.raises(hodiff.InputError, match="expected a loss with its graph"):
        optimizer.step(partial(lambda inner: inner(), WithoutBackward(loss, print)))
    with pytest.raises(hodiff.InputError, match="expected a loss with its graph"):
        optimizer.step(lambda: loss().detach())
    assert all(map(torch.equal, problem.model.parameters(), before))


@optimizers_with(loop=True)
def test_closure_that_returns_none_keeps_gradients(case):
    """Closures that only return None, like Lightning's in manual optimization, keep the gradients."""
    ours, theirs = Problem(), Problem()
    optimizer = case(ours.model.parameters())
    for i, batch in enumerate(ours.batches):
        if i % 3 == 2:
            optimizer.step(lambda batch=batch: ours.loss(batch))
            continue
        optimizer.zero_grad()
        ours.loss(batch).backward()
        before = [p.grad for p in ours.model.parameters()]
        assert optimizer.step(lambda: None) is None
        assert all(p.grad is g for p, g in zip(ours.model.parameters(), before, strict=True))
    assert same(ours.numbers(), theirs.run(case, case(theirs.model.parameters())))
    # A closure that forgets to return its loss is not mistaken for such a closure.
    optimizer.step(lambda: ours.loss(batch))
    with pytest.raises(hodiff.InputError, match="closure: expected a closure that returns the loss"):
        optimizer.step(lambda: None)


def accumulating_closure(problem, batch, optimizer=None, **zeroing):
    """Return a closure like Lightning's, which zeroes gradients at the first of several batches."""

    def closure():
        if optimizer is not None:
            optimizer.zero_grad(**zeroing)
        loss = problem.loss(batch)
        loss.backward()
        return loss

    return closure


@optimizers_with(loop=True)
def test_closures_that_accumulate_gradients_match(case):
    ours, theirs = Problem(), Problem()
    optimizer, other = case(ours.model.parameters()), case(theirs.model.parameters())
    for i in range(0, 8, 2):
        accumulating_closure(ours, ours.batches[i], optimizer, set_to_none=i > 2)()
        optimizer.step(accumulating_closure(ours, ours.batches[i + 1]))
        other.zero_grad()
        for batch in theirs.batches[i : i + 2]:
            theirs.loss(batch).backward()
        other.step()
    assert same(ours.numbers(), theirs.numbers())


@optimizers_with(loop=False, backward=True)
def test_closure_that_adds_to_older_gradients_is_rejected(case):
    problem = Problem()
    optimizer = case(problem.model.parameters())
    accumulating_closure(problem, problem.batches[0])()
    before = problem.numbers()
    with pytest.raises(hodiff.InputError, match="adds to gradients from before the step"):
        optimizer.step(accumulating_closure(problem, problem.batches[1]))
    assert same(before, problem.numbers())
    optimizer.step(accumulating_closure(problem, problem.batches[1], optimizer))
    optimizer.step(accumulating_closure(problem, problem.batches[1]))
    assert not same(before, problem.numbers())


@pytest.mark.parametrize("base", [torch.optim.SGD, hodiff.optim.SOAP])
def test_global_step_hooks_run_once(base):
    w = torch.ones(2, requires_grad=True)
    optimizer, seen = hodiff.optim.SAM([w], base, lr=0.1), []
    optimizer.base.register_step_post_hook(lambda *_: seen.append("own"))
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after")),
    ]
    optimizer.step(lambda: (w**2).sum())
    for handle in handles:
        handle.remove()
    assert seen == ["before", "own", "after"]


@optimizers_with(backward=False)
def test_closure_that_frees_its_graph_is_rejected(case):
    w = torch.ones(2, requires_grad=True)

    def closure():
        loss = (w**2).sum()
        loss.backward()
        return loss

    with pytest.raises(hodiff.InputError, match="does not call backward"):
        case([w]).step(closure)


def many_parameters():
    """Return parameters of several shapes, layouts and dtypes, including numbers."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(n, generator=generator, dtype=D) for n in range(5)]
    made += [torch.randn(2, 3, 2, 2, generator=generator), torch.randn(3, 2, generator=generator).T, torch.randn(())]
    return [each.requires_grad_() for each in made]


@pytest.mark.parametrize("name", ["AdaHessian", "SophiaH", "SophiaG", "SAM", "ASAM"])
def test_foreach_steps_match_single_steps(name):
    case = TABLE[name]
    ways = {}
    for foreach in (False, True, None):
        torch.manual_seed(0)
        parameters = many_parameters()
        groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.03, "maximize": True}]
        optimizer = case(groups, foreach=foreach)
        for step in range(5):
            # The first parameters have no gradient at first.
            optimizer.step(quadratic(case, parameters[2:] if step < 2 else parameters))
        ways[foreach] = [p.detach() for p in parameters]
    torch.manual_seed(0)
    assert not any(torch.equal(p, q) for p, q in zip(many_parameters(), ways[False], strict=True) if p.numel())
    assert same(ways[False], ways[True])
    assert same(ways[False], ways[None])


BAD = {
    "foreach": ["yes"],
    "lr": [-1.0, "a", float("nan"), torch.ones(2)],
    "betas": [(0.9, 1.0), 0.9, (0.9, "b")],
    "eps": [-1.0, None],
    "weight_decay": [-0.1],
    "update_every": [0, 1.5],
    "gamma": [0.0],
    "hessian_power": [2.0],
    "probes": ["uniform"],
    "generator": [3],
    "rho": [-1.0],
    "adaptive": [1],
    "damping": [-1.0],
    "cg_iterations": [0],
    "cg_tolerance": [-1.0],
    "warm_start": [1.5],
    "maximize": [1],
    "history_size": [0],
    "accumulate": [1],
    "grafting": ["lamb"],
    "refresh_every": [0, None],
    "max_preconditioner_size": [0],
    "merge_dims": ["yes"],
    "momentum": [1.0],
    "factor_decay": [1.0],
    "kl_clip": [0.0],
    "fisher": ["true"],
    "sharing": [None],
    "preconditioner": ["jacobi"],
    "line_search_fn": ["strong_wolfe"],
    "process_group": [3, "world"],
}


@every
def test_rejects_bad_settings(case):
    import inspect

    known = inspect.signature(case.make).parameters
    for name in [name for name in BAD if name in known]:
        for value in BAD[name]:
            with pytest.raises(hodiff.InputError, match=f": {name}"):
                case([torch.ones(2, requires_grad=True)], **{name: value})
    optimizer = case([torch.ones(2, requires_grad=True)])
    if case.groups:
        with pytest.raises(hodiff.InputError, match=": lr"):
            optimizer.add_param_group({"params": [torch.ones(1, requires_grad=True)], "lr": -1.0})
        assert len(optimizer.param_groups) == 1
        optimizer.add_param_group({"params": [torch.ones(1, requires_grad=True)], "lr": 0.5})
    with pytest.raises(ValueError, match="empty parameter list"):
        case([])


@cache
def states():
    """Return the states of all optimizers after two steps."""
    found = {}
    torchs = {"Adam": Case(torch.optim.Adam), "SGD": Case(partial(torch.optim.SGD, momentum=0.9))}
    for name, case in {**TABLE, **torchs}.items():
        problem = Problem()
        optimizer = case(problem.model.parameters())
        problem.run(case, optimizer, problem.batches[:2])
        found[name] = optimizer.state_dict()
    return found


# Optimizers in a set accept each other's states: the entries mean the same or are absent, and extras are off.
ALIKE = [
    {"SophiaH", "SophiaG"},
    {"Shampoo", "Shampoo, the paper's"},
    # KLShampoo has no use for the squares in KLSOAP's state, which KLSOAP requires.
    {"KLShampoo", "KLSOAP"},
    {"Muon", "Muon, the original"},
    {
        "NewtonCG",
        "NewtonCG, Gauss-Newton",
        "NewtonCG, line search",
    },
    {"LayerwiseGaussNewton", "LayerwiseGaussNewton, adaptive"},
    {"HessianFree", "HessianFree, preconditioned"},
]


@every
def test_rejects_states_of_other_optimizers(case):
    mine = next(name for name, each in TABLE.items() if each is case)
    alike = set().union(*(each for each in ALIKE if mine in each))
    others = {name: state for name, state in states().items() if name not in alike | {mine}}
    optimizer = case(Problem().model.parameters())
    before = str(optimizer.state_dict())
    for state in others.values():
        with pytest.raises(hodiff.InputError, match="expected what the state_dict of this optimizer returns, got"):
            optimizer.load_state_dict(state)
        assert str(optimizer.state_dict()) == before


@every
def test_rejects_states_of_parameters_of_other_shapes(case):
    mine = next(name for name, each in TABLE.items() if each is case)
    if not states()[mine]["state"]:
        pytest.skip("the state has no shapes")
    other = Problem()
    other.model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = case(other.model.parameters())
    before = str(optimizer.state_dict())
    with pytest.raises(
        hodiff.InputError, match=r"load_state_dict: expected a state of parameters of the same shapes, got"
    ):
        optimizer.load_state_dict(states()[mine])
    assert str(optimizer.state_dict()) == before
    other.run(case, optimizer, other.batches[:1])


@every
def test_rejects_damaged_states(case):
    mine = next(name for name, each in TABLE.items() if each is case)
    optimizer = case(Problem().model.parameters())
    before = str(optimizer.state_dict())
    state = copy.deepcopy(states()[mine])
    group = state["param_groups"][0]
    damaged = {
        name: {**group, name: -1.0} for name in ("lr", "damping", "weight_decay", "betas", "rho") if name in group
    }
    assert damaged
    for name, each in damaged.items():
        with pytest.raises(hodiff.InputError, match=rf"load_state_dict: {name}.*: expected .*got -1"):
            optimizer.load_state_dict({**state, "param_groups": [each]})
        assert str(optimizer.state_dict()) == before
    if "generator" in state:
        with pytest.raises(hodiff.InputError, match="load_state_dict: generator: expected the state of a generator"):
            optimizer.load_state_dict({**state, "generator": state["generator"][:100]})
        assert str(optimizer.state_dict()) == before


def damages(entry):
    """Yield damaged copies of an entry of a state, with the part of the message that they cause."""
    finite, fits = "expected finite numbers", "expected a state of parameters of the same shapes"
    if isinstance(entry, torch.Tensor) and entry.is_floating_point():
        for value in (float("nan"), float("inf")):
            yield torch.full_like(entry, value), finite
        yield entry.to("meta"), "expected tensors with data"
        yield torch.cat([entry.reshape(-1)] * 2), fits
        yield "text", fits
    elif isinstance(entry, list) and len(entry) > 1:
        for i, each in enumerate(entry):
            if isinstance(each, torch.Tensor):
                yield from (([*entry[:i], bad, *entry[i + 1 :]], text) for bad, text in damages(each))
        yield entry[1:], fits
        yield [*entry, entry[0]], fits
        yield None, fits
    elif isinstance(entry, float):
        yield from ((value, finite) for value in (float("nan"), -float("inf")))
    elif isinstance(entry, int):
        yield from ((bad, "expected a finite number of at least 0") for bad in (-1, float("nan"), None, "1"))


def named(name, text):
    """Return what the message names; of L-BFGS's lists, which have equal lengths, it may name another one."""
    lists = {"ro", "old_dirs", "old_stps"}
    return f"({'|'.join(lists)})" if name in lists and text.endswith("same shapes") else name


@every
def test_rejects_damaged_entries(case):
    mine = next(name for name, each in TABLE.items() if each is case)
    state = states()[mine]
    optimizer = case(Problem().model.parameters())
    before, count = str(optimizer.state_dict()), 0
    number = max(state["state"], default=None)
    number = number if number is None or len(state["state"]) > 1 else 0
    for name, entry in state["state"].get(number, {}).items():
        for bad, text in damages(entry):
            if name == "step" and isinstance(entry, torch.Tensor):  # that of torch's Adam
                text = text.replace("finite numbers", "a finite number of at least 0")
            if text.endswith("same shapes") and name in {"step", "al"}:
                continue  # torch's step makes new scratch space "al"
            changed = {**state["state"], number: {**state["state"][number], name: bad}}
            with pytest.raises(hodiff.InputError, match=rf"load_state_dict: {text}, got '{named(name, text)}'"):
                optimizer.load_state_dict({**state, "state": changed})
            count += 1
    extra = {**state["state"], "since gone": {"step": 1}}
    with pytest.raises(hodiff.InputError, match="got one with 'since gone', which is not the number of a parameter"):
        optimizer.load_state_dict({**state, "state": extra})
    assert str(optimizer.state_dict()) == before
    assert bool(count) == bool(state["state"])
    optimizer.load_state_dict(state)


@pytest.mark.parametrize("name", ["KFAC", "EKFAC"])
def test_rejects_cut_layouts(name):
    optimizer = TABLE[name](Problem().model.parameters())
    before = str(optimizer.state_dict())
    state = copy.deepcopy(states()[name])
    entries = next(each for each in state["state"].values() if "layout" in each)
    dim, ((index, shape, turned), *others) = entries["layout"]
    for layout in ((dim,), (dim, ((index, shape[1:], turned), *others)), (dim, ((index,), *others)), (dim, ())):
        entries["layout"] = layout
        with pytest.raises(hodiff.InputError, match="load_state_dict: expected a state of parameters of the same"):
            optimizer.load_state_dict(state)
    assert str(optimizer.state_dict()) == before


@pytest.mark.parametrize("name", ["AdaHessian", "Muon", "SOAP"])
def test_states_out_of_the_range_of_float16_are_accepted(name):
    state = copy.deepcopy(states()[name])
    for each in state["state"].values():
        each["exp_avg"].fill_(1e6)
    optimizer = TABLE[name](Problem().model.half().parameters())
    optimizer.load_state_dict(state)
    loaded = [each["exp_avg"] for each in optimizer.state_dict()["state"].values()]
    assert all(each.dtype == torch.float32 and bool((each == 1e6).all()) for each in loaded)


@pytest.mark.one_in(3)
@every
def test_older_states_without_newer_options_are_accepted(case):
    problem, other = Problem(), Problem()
    optimizer = case(problem.model.parameters())
    problem.run(case, optimizer, problem.batches[:4])
    older = copy.deepcopy(optimizer.state_dict())
    for group in older["param_groups"]:
        for name in [name for name, value in group.items() if value is None or value is False]:
            del group[name]
        group["since gone"] = 3
    other.model.load_state_dict(problem.model.state_dict())
    loaded = case(other.model.parameters())
    loaded.load_state_dict(older)
    assert same(problem.run(case, optimizer, problem.batches[4:]), other.run(case, loaded, problem.batches[4:]))


@every
def test_dtype_may_change_during_training(case):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    problem = Problem()
    problem.model, batches = model, problem.batches
    single = [(inputs.float(), labels) for inputs, labels in batches]
    optimizer = case(model.parameters())
    problem.run(case, optimizer, single[:3])
    kept = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
    if all(each.dtype == D for each in kept):
        pytest.skip("nothing is kept, or in float64 for parameters of all dtypes")
    if case.watches:
        optimizer.zero_grad()
        problem.loss(single[3]).backward()
    model.double()
    before = problem.numbers()
    with pytest.raises(hodiff.InputError, match=r"step: expected parameters of the dtype .* torch\.float32, got"):
        optimizer.step(problem.closure(case, batches[3]))
    assert same(before, problem.numbers())
    optimizer.load_state_dict(optimizer.state_dict())
    problem.run(case, optimizer, batches[3:])
    assert not same(before, problem.numbers())


@optimizers_with(bare=True)
def test_unused_parameters_do_not_decay(case):
    import inspect

    if "weight_decay" not in inspect.signature(case.make).parameters:
        pytest.skip("no weight decay")
    used, unused = (torch.full((2,), 3.0, dtype=D, requires_grad=True) for _ in range(2))
    optimizer = case([used, unused], weight_decay=0.1)
    for _ in range(3):
        optimizer.step(quadratic(case, [used]))
    assert unused.tolist() == [3.0, 3.0]
    assert unused.grad is None
    assert not torch.equal(used, torch.full((2,), 3.0, dtype=D))


@optimizers_with(bare=True)
def test_closure_that_raises_leaves_parameters_and_state(case):
    parameter = torch.full((3,), 3.0, dtype=D, requires_grad=True)
    optimizer, count = case([parameter]), itertools.count(1)
    closure = quadratic(case, [parameter])

    def fails():
        if next(count) == 2:
            raise KeyError
        return closure()

    optimizer.step(closure)
    points = [parameter.detach().clone()]

    def steps():  # the second evaluation may belong to another step
        optimizer.step(fails)
        points.append(parameter.detach().clone())
        optimizer.step(fails)

    with pytest.raises(KeyError):
        steps()
    assert torch.equal(parameter, points[-1])
    pickle.dumps(optimizer)
    optimizer.step(closure)
    assert parameter.isfinite().all()


@optimizers_with(bare=True)
def test_nan_loss_is_rejected(case):
    parameter = torch.full((3,), 3.0, dtype=D, requires_grad=True)
    optimizer = case([parameter])
    with pytest.raises(hodiff.InputError):
        optimizer.step(quadratic(case, [parameter], scale=float("nan")))
    assert torch.equal(parameter, torch.full((3,), 3.0, dtype=D))
    optimizer.step(quadratic(case, [parameter]))
    assert parameter.isfinite().all()


def test_state_of_torch_lbfgs_resumes_with_a_line_search():
    problem = Problem()
    theirs = torch.optim.LBFGS(problem.model.parameters())

    def closure():
        theirs.zero_grad()
        loss = problem.loss(problem.batches[0])
        loss.backward()
        return loss

    theirs.step(closure)
    ours = hodiff.optim.LBFGS(problem.model.parameters())
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["line_search_fn"] == "strong_wolfe"
