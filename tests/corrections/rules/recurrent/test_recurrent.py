"""Recurrent networks inside `corrected()` have torch's values and draws, and derivatives by every route."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from slow_cases import slow_except
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode

import hodiff
from hodiff.corrections.mechanism.registry import CORRECTIONS

D = torch.float64
NETWORKS = {
    "lstm": nn.LSTM,
    "projected lstm": lambda *sizes, **options: nn.LSTM(*sizes, proj_size=2, **options),
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
LENGTHS = [5, 2, 4, 2]


def normal(*shape, dtype=D):
    return torch.randn(shape, dtype=dtype)


def unrolled(network, x, lengths, state, mode):
    """All results of a call, including those of padding and packing."""
    torch.manual_seed(3)
    with mode:
        if lengths is not None:
            x = pack_padded_sequence(x, lengths, batch_first=network.batch_first, enforce_sorted=False)
        output, final = network(x, state)
        final = final if isinstance(final, tuple) else (final,)
        if lengths is None:
            return output, *final
        padded = pad_packed_sequence(output, network.batch_first, padding_value=2.5, total_length=7)
        return output.data, *final, *padded


@pytest.mark.one_in(3)
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["padded", "packed"])
@pytest.mark.parametrize("name", NETWORKS)
def test_values_and_dropout_draws_match_torch(name, lengths):
    for bias, layers, both_ways, batch_first in itertools.product((True, False), (1, 3), (False, True), (False, True)):
        network = NETWORKS[name](
            3, 4, layers, bias=bias, dropout=0.4 * (layers > 1), bidirectional=both_ways, batch_first=batch_first
        ).double()
        x = normal(4, 5, 3) if batch_first else normal(5, 4, 3)
        count = layers * (1 + both_ways)
        state = (normal(count, 4, 2 if "projected" in name else 4), normal(count, 4, 4))
        for start in (None, state if "lstm" in name else state[0]):
            if start is not None and "projected" not in name:
                start = tuple(normal(count, 4, 4) for _ in range(2)) if "lstm" in name else normal(count, 4, 4)
            expected, got = (unrolled(network, x, lengths, start, mode) for mode in (nullcontext(), hodiff.corrected()))
            for ours, theirs in zip(got, expected, strict=True):
                assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NETWORKS)
def test_low_precision_and_autocast_match_torch(name, dtype):
    network = NETWORKS[name](3, 4).to(dtype)
    x = normal(5, 2, 3, dtype=dtype)
    for lowered in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
            try:
                expected = unrolled(network, x, None, None, nullcontext())
            except RuntimeError as error:
                if "could not create a primitive" not in str(error):
                    raise
                pytest.skip("oneDNN has no LSTM of this dtype on this processor")
            got = unrolled(network, x, None, None, hodiff.corrected())
        for ours, theirs in zip(got, expected, strict=True):
            assert ours.dtype == theirs.dtype
            tolerance = 2e-2 if ours.dtype == torch.bfloat16 or lowered else 1e-5
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_unbatched_input_matches_torch():
    network, x = nn.LSTM(3, 4).double(), normal(5, 3)
    expected, got = (unrolled(network, x, None, None, mode) for mode in (nullcontext(), hodiff.corrected()))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def test_undifferentiated_calls_run_the_kernel_of_torch():
    network, x = nn.LSTM(3, 4), normal(5, 2, 3, dtype=torch.float32)
    with torch.no_grad():
        expected, got = (unrolled(network, x, None, None, mode) for mode in (nullcontext(), hodiff.corrected()))
    assert all(map(torch.equal, got, expected))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_packed_networks_match_differences_by_all_routes(name):
    network = NETWORKS[name](1, 3, 2, bidirectional=True).double().requires_grad_(False)

    @hodiff.corrected()
    def f(x):
        output, final = network(pack_padded_sequence(x, [3, 1]))
        final = final[0] if isinstance(final, tuple) else final
        return pad_packed_sequence(output)[0].sum(-1), final.sum(-1)

    hodiff.assert_differentiable(f, normal(3, 2, 1), scipy=False, vmap=name == "gru")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_third_derivatives_by_input_and_weights_match_differences(name):
    network = NETWORKS[name](1, 2).double()
    names = [name for name, _ in network.named_parameters()]

    @hodiff.corrected()
    def f(x, *weights):
        return torch.func.functional_call(network, dict(zip(names, weights, strict=True)), (x,))[0].sum(-1)

    weights = tuple(weight.detach() for weight in network.parameters())
    hodiff.assert_differentiable(f, (normal(2, 1, 1), *weights), order=3, scipy=False, vmap=False)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_float32_lstm_hvp_by_every_route_matches_float64(route):
    """Torch's kernel for it has no forward mode."""
    network = nn.LSTM(3, 4).requires_grad_(False)
    double = nn.LSTM(3, 4).double()
    double.load_state_dict(network.state_dict())
    x, v = normal(3, 2, 3), normal(3, 2, 3)
    truth = hodiff.hvp(lambda x: double(x)[0].sin().sum(), x, v)
    got = hodiff.hvp(lambda x: network(x)[0].sin().sum(), x.float(), v.float(), route=route)
    torch.testing.assert_close(got.double(), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_one_lstm_step_matches_closed_form(route):
    r"""One cell without biases, from c = 1 and h = 0: $h = s(ox) \tanh(s(fx) + s(ix) \tanh(gx))$."""
    i, f, g, o = 0.3, -0.8, 1.1, 0.6
    network = nn.LSTM(1, 1, bias=False).double()
    with torch.no_grad():
        network.weight_ih_l0.copy_(torch.tensor([[i], [f], [g], [o]], dtype=D))
    start = torch.zeros(1, 1, 1, dtype=D), torch.ones(1, 1, 1, dtype=D)
    x = torch.tensor(0.7, dtype=D)

    def s(x):
        value = torch.sigmoid(x)
        return value, value * (1 - value), value * (1 - value) * (1 - 2 * value)

    def tanh(x):
        value = torch.tanh(x)
        return value, 1 - value**2, -2 * value * (1 - value**2)

    def product(a, b):
        return a[0] * b[0], a[1] * b[0] + a[0] * b[1], a[2] * b[0] + 2 * a[1] * b[1] + a[0] * b[2]

    def of_line(function, slope):  # value, first and second derivative of function(slope * x)
        return tuple(each * slope**k for k, each in enumerate(function(slope * x)))

    cell = [sum(each) for each in zip(of_line(s, f), product(of_line(s, i), of_line(tanh, g)), strict=True)]
    t = tanh(cell[0])
    squashed = t[0], t[1] * cell[1], t[2] * cell[1] ** 2 + t[1] * cell[2]
    value, _, second = product(of_line(s, o), squashed)

    def h(x):
        return network(x.view(1, 1, 1), start)[0].sum()

    torch.testing.assert_close(h(x), value, rtol=1e-12, atol=0)
    torch.testing.assert_close(hodiff.hvp(h, x, torch.ones_like(x), route=route), second, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_cells_match_by_every_route(route):
    for cell in (nn.LSTMCell(3, 4), nn.GRUCell(3, 4), nn.RNNCell(3, 4), nn.RNNCell(3, 4, nonlinearity="relu")):
        cell.double().requires_grad_(False)

        def f(x, cell=cell):
            found = cell(x)
            return (found[0] if isinstance(found, tuple) else found).sin().sum()

        x, v = normal(2, 3), normal(2, 3)
        expected = hodiff.hvp(f, x, v, route="reverse-over-reverse")
        torch.testing.assert_close(hodiff.hvp(f, x, v, route=route), expected, rtol=1e-10, atol=1e-13)
    assert not {torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell} & set(CORRECTIONS)


def test_vmap_of_gradients_matches_a_loop():
    network = nn.GRU(3, 4).double()
    xs = normal(6, 5, 2, 3)
    gradient = torch.func.grad(hodiff.corrected()(lambda x: network(x)[0].sin().sum()))
    torch.testing.assert_close(
        torch.func.vmap(gradient)(xs), torch.stack([gradient(x) for x in xs]), rtol=1e-12, atol=1e-13
    )


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [torch.lstm, torch.gru])
@pytest.mark.parametrize("route", slow_except(hodiff.ROUTES[:3], hodiff.ROUTES[:1]))
def test_compiled_hvp_matches(kind, route):
    network = (nn.LSTM if kind is torch.lstm else nn.GRU)(2, 3).double().requires_grad_(False)
    state = torch.zeros(1, 2, 3, dtype=D)
    start = (state, state) if kind is torch.lstm else state
    weights = [each.detach() for each in network.parameters()]

    def product(x):
        def f(x):
            return kind(x, start, weights, True, 1, 0.0, True, False, False)[0].sin().sum()

        return hodiff.hvp(f, x, x, route=route)

    torch.compiler.reset()
    x = normal(3, 2, 2)
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), product(x), rtol=1e-12, atol=1e-13)


def call(kind, *, x=(3, 2, 2), state=(1, 2, 3), weights=4, layers=1, sizes=None):
    x, state = normal(*x).requires_grad_(), normal(*state)
    parameters = [normal(12, 2), normal(12, 3), normal(12), normal(12)][:weights]
    start = (state, state) if kind is torch.lstm else state
    if sizes is not None:
        return kind(x, torch.tensor(sizes), start, parameters, True, layers, 0.0, True, False)
    return kind(x, start, parameters, True, layers, 0.0, True, False, False)


WRONG = {
    "features": lambda: call(torch.lstm, x=(3, 2, 5)),
    "batch of the state": lambda: call(torch.lstm, state=(1, 4, 3)),
    "size of the state": lambda: call(torch.lstm, state=(1, 2, 4)),
    "layers": lambda: call(torch.lstm, layers=2),
    "parameters": lambda: call(torch.lstm, weights=3),
    "gates": lambda: call(torch.gru),
    "two dimensions": lambda: call(torch.lstm, x=(3, 2)),
    "no steps": lambda: call(torch.lstm, x=(0, 2, 2)),
    "batch sizes": lambda: call(torch.lstm, x=(3, 2), sizes=[2, 2]),
    "growing": lambda: call(torch.lstm, x=(3, 2), sizes=[1, 2]),
    "packed state": lambda: call(torch.lstm, x=(3, 2), sizes=[2, 1], state=(1, 3, 3)),
    "lengths": lambda: pack_padded_sequence(normal(3, 2, 2), [2, 3]),
    "zero length": lambda: pack_padded_sequence(normal(3, 2, 2), [2, 0]),
    "too many lengths": lambda: pack_padded_sequence(normal(3, 2, 2), [3, 2, 1]),
    "too long": lambda: pack_padded_sequence(normal(3, 2, 2), [4, 2]),
    "one dimension": lambda: pack_padded_sequence(normal(3), [3]),
    "nothing to pack": lambda: pack_padded_sequence(normal(3, 0, 2), []),
    "total length": lambda: pad_packed_sequence(pack_padded_sequence(normal(3, 2, 2), [3, 2]), total_length=2),
    "no tensor": lambda: torch.lstm(1, 2, 3),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_match_torch(name):
    def outcome(mode):
        torch.manual_seed(0)
        with mode:
            try:
                return [each if each is None else each.shape for each in WRONG[name]()]
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                return type(error), str(error)

    assert outcome(hodiff.corrected()) == outcome(nullcontext())


class AsOnGPU(TorchFunctionMode):
    """Says of all tensors that they are on a GPU, where recurrent layers move their weights together for cuDNN."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return True if func == torch.Tensor.is_cuda.__get__ else func(*args, **(kwargs or {}))


@pytest.mark.parametrize("route", hodiff.ROUTES)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_replaced_parameters_of_a_layer_on_a_gpu(kind, route, monkeypatch):
    """In forward mode and torch.func, tensors have no address that torch could ask for."""
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: True)
    # Builds of torch for CUDA move the weights, also without a GPU.
    monkeypatch.setattr(torch, "_use_cudnn_rnn_flatten_weight", lambda: False)
    torch.manual_seed(0)
    layer, x = kind(2, 3).double(), normal(4, 2, 2)
    parameters = {name: each.detach() for name, each in layer.named_parameters()}
    v = {name: normal(*each.shape) for name, each in parameters.items()}

    def f(parameters):
        return torch.func.functional_call(layer, parameters, (x,))[0].sin().sum()

    expected = hodiff.hvp(f, parameters, v, route=route)
    with AsOnGPU():
        found = hodiff.hvp(f, parameters, v, route=route)
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_address_in_a_transform_raises_elsewhere():
    with pytest.raises(RuntimeError, match="data pointer"), hodiff.corrected():
        torch.func.grad(lambda x: x.sum() * x.data_ptr())(normal(2))
