"""Checkpoints in ordinary training of modules under `fully_shard`, in a single process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import hodiff


@pytest.fixture
def mesh():
    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


class Checkpointed(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.part, self.call = nn.Linear(2, 2), call

    def forward(self, x):
        return self.call(self.part, x)


def test_checkpoints_of_hodiff_are_refused(mesh):
    """Gradients of the second step would be missing, without an error."""
    from torch.distributed.fsdp import fully_shard

    with pytest.raises(hodiff.InputError, match="checkpoint: expected modules without fully_shard"):
        fully_shard(Checkpointed(hodiff.functions.checkpoint), mesh=mesh)(torch.ones(1, 2))
    of_torch = fully_shard(Checkpointed(lambda f, x: checkpoint(f, x, use_reentrant=False)), mesh=mesh)
    with pytest.raises(hodiff.InputError, match=r"torch\.utils\.checkpoint: expected"), hodiff.corrected():
        of_torch(torch.ones(1, 2))


def test_products_after_a_forward_pass_that_raised(mesh):
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(2, 2), mesh=mesh)
    x, inputs = dict(model.named_parameters()), torch.ones(1, 2)
    v = {name: torch.ones_like(each) for name, each in x.items()}

    def loss(x):
        return torch.func.functional_call(model, x, (inputs,)).square().sum()

    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    with pytest.raises(hodiff.InputError, match="or one whose last forward pass raised"):
        hodiff.hvp(loss, x, v)
    model(inputs).sum().backward()
    assert hodiff.hvp(loss, x, v)["bias"].full_tensor().tolist() == [6.0, 6.0]
