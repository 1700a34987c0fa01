"""MAGIC of bergson with hodiff's attention, and against hodiff's own derivative through training."""

import copy

import pytest
import torch
import torchopt
from doors.bergson.magic import BATCH, DOCUMENTS, draw, scores
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import hodiff
from hodiff.meta import SGD, adapt

D = torch.float64


def small(attention):
    return draw(16, attention, dtype=D, width=16, vocabulary=11)


def test_corrected_attention_has_the_scores_of_eager_attention():
    loss, expected = scores(*small("eager"))
    with hodiff.corrected():
        found_loss, found = scores(*small("sdpa"))
    assert expected.abs().min() > 1e-6
    torch.testing.assert_close(found_loss, loss)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-10)


def test_torchs_own_attention_has_no_second_derivative():
    with pytest.raises(RuntimeError, match="is not implemented"):
        scores(*small("sdpa"))


def test_scores_are_hodiffs_derivative_through_training():
    rate = 0.5
    model, tokens = small("sdpa")
    net = copy.deepcopy(model)
    start = {name: p.detach() for name, p in net.named_parameters()}

    def losses(parameters, documents):
        logits = functional_call(net, parameters, (tokens[documents],)).logits[:, :-1]
        return cross_entropy(logits.transpose(1, 2), tokens[documents, 1:], reduction="none").mean(1)

    def held_out(weights):
        batches = torch.arange(DOCUMENTS).split(BATCH)
        end = adapt(
            lambda p, b: weights[b] @ losses(p, b) / len(b), start, batches.__getitem__, SGD(rate), len(batches)
        )
        return losses(end, batches[0]).mean()

    expected, value = torch.func.grad_and_value(held_out)(torch.ones(DOCUMENTS, dtype=D))
    with hodiff.corrected():
        loss, found = scores(model, tokens, torchopt.sgd(rate))
    torch.testing.assert_close(loss, value)
    torch.testing.assert_close(found.to(D), expected, rtol=1e-5, atol=1e-9)
