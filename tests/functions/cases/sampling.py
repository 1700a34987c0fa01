"""Reparametrized samples with given noise."""

import torch
from functions.case import FunctionCase, normal, uniform

from hodiff.functions.sampling import perturbed_softmax


def soft_sample(x, noise, temperature):
    e = torch.exp((x + noise) / temperature)
    return e / e.sum(-1, keepdim=True)


def hard_sample(x, noise, temperature):
    return torch.nn.functional.one_hot((x + noise).argmax(-1), x.shape[-1]).to(x.dtype) + 0 * temperature


def draw(dtype, g):
    return normal((2, 3), dtype, g), normal((2, 3), dtype, g), uniform(0.8, 1.5, (2, 1), dtype, g)


CASES = [
    FunctionCase(
        name="gumbel_softmax",
        function=perturbed_softmax,
        Function=None,
        inputs=draw,
        formula=r"\operatorname{softmax}((x + g)/\tau)",
        reference=soft_sample,
        # The division saves the temperature and the perturbed logits; the softmax saves its output.
        saved_bytes=lambda x, noise, temperature: 2 * x.nbytes + temperature.nbytes,
        saved="output (and input and temperature, if that is a tensor)",
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype), torch.ones(0, 3, dtype=dtype), torch.ones(1, dtype=dtype)),
    ),
    FunctionCase(
        name="gumbel_softmax-hard",
        function=lambda x, noise, temperature: perturbed_softmax(x, noise, temperature, hard=True),
        Function=None,
        inputs=draw,
        formula=r"\operatorname{onehot}(\arg\max_c (x + g)_c)",
        reference=hard_sample,
        surrogate=soft_sample,
    ),
]
