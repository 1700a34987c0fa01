"""Tests of special modules inside a function of jets, against nested forward mode with corrections."""

import copy

import pytest
import torch
from drawing import normals, seeded
from taylor.nested import along_a_curve, laplacian
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, rnn

import hodiff
from hodiff.taylor import jet

randn = normals(seeded())

torch.manual_seed(0)
X, V, C = randn(4), randn(4), randn(4)
LSTM = nn.LSTM(2, 3, num_layers=2, batch_first=True)
GRU, RNN, CELL = nn.GRU(2, 3, bidirectional=True), nn.RNN(2, 3), nn.LSTMCell(2, 3)
ATTENTION = nn.MultiheadAttention(2, 1)
ENCODER = nn.TransformerEncoderLayer(2, 1, 4, batch_first=True, dropout=0.0)
# In evaluation mode without gradients, torch runs a fused kernel.
FAST = copy.deepcopy(ENCODER).eval()
DECODER = nn.TransformerDecoderLayer(2, 1, 4, batch_first=True, dropout=0.0)
HOOKED, NORM = nn.Linear(4, 4), nn.BatchNorm1d(4)
PARAMETRIZED = {
    "weight norm": parametrizations.weight_norm(nn.Linear(4, 4)),
    "orthogonal": parametrizations.orthogonal(nn.Linear(4, 4)),
    "spectral norm": parametrizations.spectral_norm(nn.Linear(4, 4)).eval(),
}
for module in (LSTM, GRU, RNN, CELL, ATTENTION, ENCODER, FAST, DECODER, HOOKED, NORM, *PARAMETRIZED.values()):
    module.double().requires_grad_(False)
HOOKED.register_forward_hook(lambda module, args, output: output.sin())
HOOKED.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
MASK = torch.tensor([[True, False], [True, True]])


def attention(x, **options):
    q = x.reshape(1, 2, 2)
    return functional.scaled_dot_product_attention(q, q * 2, q.sin(), **options)


def autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.matmul(x, randn_matrix) * x


randn_matrix = randn(4, 4)
CASES = {
    "LSTM": lambda x: LSTM(x.reshape(1, 2, 2))[0],
    "LSTM, packed": lambda x: LSTM(rnn.pack_padded_sequence(x.reshape(1, 2, 2), [2], batch_first=True))[1][0],
    "GRU": lambda x: GRU(x.reshape(2, 1, 2))[0],
    "RNN": lambda x: RNN(x.reshape(2, 1, 2))[1],
    "LSTMCell": lambda x: CELL(x.reshape(2, 2))[1],
    "attention": lambda x: ATTENTION(*[x.reshape(2, 1, 2)] * 3)[0],
    "attention, its weights": lambda x: ATTENTION(*[x.reshape(2, 1, 2)] * 3, average_attn_weights=False)[1],
    "attention, masked": lambda x: ATTENTION(*[x.reshape(2, 1, 2)] * 3, attn_mask=~MASK, need_weights=False)[0],
    "encoder": lambda x: ENCODER(x.reshape(1, 2, 2)),
    "encoder, fast": lambda x: FAST(x.reshape(1, 2, 2), src_key_padding_mask=torch.tensor([[False, True]])),
    "decoder": lambda x: DECODER(x.reshape(1, 2, 2), x.reshape(1, 2, 2)),
    "causal": lambda x: attention(x, is_causal=True),
    "boolean mask": lambda x: attention(x, attn_mask=MASK),
    "additive mask": lambda x: attention(x, attn_mask=randn_matrix[:2, :2]),
    "forward hooks": HOOKED,
    "batch norm": lambda x: NORM(x * randn_matrix),
    "autocast": autocast,
    **PARAMETRIZED,
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_module_matches_nested_forward_mode(name):
    f = CASES[name]
    value, derivatives = jet(f, (X,), ([V, C],))
    torch.testing.assert_close((value, *derivatives), along_a_curve(f, X, [V, C]))
    if name in ("LSTM", "attention", "encoder, fast", "causal", "forward hooks"):
        torch.testing.assert_close(hodiff.laplacian(f)(X), laplacian(f, X))
