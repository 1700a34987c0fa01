"""Functions that modify a differentiated tensor in place, as embeddings with max_norm do, are reported as such."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hodiff

PLACES = torch.tensor([[0, 1], [2, 1]])


def large():
    return 2 * torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.slow
def test_embedding_with_max_norm_is_reported_as_in_place():
    weight = large()
    report = hodiff.check(lambda w: F.embedding(PLACES, w, max_norm=1.0) ** 2, weight, scipy=False, vmap=False)
    assert report.codes[0] == "HD303", str(report)  # a rule that refuses the derivative comes second
    assert "as an embedding with max_norm does" in report.errors[0].cause
    assert torch.equal(weight, large())


@pytest.mark.slow
def test_module_with_max_norm_is_reported_with_the_option():
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 2))
    report = hodiff.check(model, PLACES)
    assert report.codes == ("HD408",), str(report)
    assert "norms of at most max_norm=1.0" in " ".join(str(report).split())


def test_harmless_in_place_writes_are_not_reported():
    assert hodiff.check(nn.Embedding(5, 4, max_norm=100.0), PLACES).ok
    # gradcheck itself reports that torch refuses to modify a leaf in place.
    report = hodiff.check(lambda x: x.mul_(2) ** 2, large(), scipy=False, vmap=False)
    assert "HD303" not in report.codes
