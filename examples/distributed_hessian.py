"""The largest eigenvalues of the Hessian of a network's loss, with the data split over the ranks of a process group.

    python examples/distributed_hessian.py                                  one process, all images
    torchrun --nproc-per-node 2 examples/distributed_hessian.py             two, with half of the images each

Both commands print the same numbers. Each rank multiplies with the Hessian of its own images, and all-reduce adds the
products, weighted by the number of images. On GPUs, pass `--backend nccl`, and create every tensor on a device.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

import hodiff
from hodiff.checks import along_directions
from hodiff.estimators import eigsh

Parameters = dict[str, Tensor]


def make_network(hidden: int) -> nn.Module:
    """Return a network with one hidden layer of tanh, in float64, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 10)).double()


def images_of(rank: int, ranks: int, count: int) -> TensorDataset:
    """Return this rank's share of the images, pixels from 0 to 1; shares may differ by one image."""
    pixels, labels = load_digits(return_X_y=True)
    mine = slice(rank, count, ranks)
    return TensorDataset(torch.from_numpy(pixels[mine] / 16), torch.from_numpy(labels[mine]))


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Top eigenvalues of a Hessian over data that ranks share.")
    parser.add_argument("--images", type=int, default=501, help="total number of images")
    parser.add_argument("--batch", type=int, default=100, help="images per batch")
    parser.add_argument("--hidden", type=int, default=24, help="width of the hidden layer")
    parser.add_argument("--eigenvalues", type=int, default=3, help="number of eigenvalues")
    parser.add_argument("--backend", default="gloo", help="backend of torch.distributed")
    return parser.parse_args()


def main() -> None:
    """Build the operator on every rank, and compute its eigenvalues."""
    options = parse_options()
    torch.set_num_threads(1)
    # torchrun sets RANK for its processes. Without it there is one process, and nothing to set up.
    group = None
    if "RANK" in os.environ:
        dist.init_process_group(options.backend)
        group = dist.group.WORLD
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)

    network = make_network(options.hidden)
    parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}

    def loss(parameters: Parameters, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(functional_call(network, parameters, (images,)), labels)

    if rank == 0:
        few = along_directions(loss, parameters, list(images_of(0, 1, 100).tensors), size=0.1)
        print(hodiff.assert_differentiable(few, torch.zeros(2, dtype=torch.float64), vmap=False).summary)

    data = DataLoader(images_of(rank, ranks, options.images), batch_size=options.batch)
    H = hodiff.HessianOperator(loss, parameters, data=data, process_group=group)
    # Every rank runs the same iteration on the same vectors; only the products are distributed.
    found = eigsh(H, options.eigenvalues, which="LA")
    if rank == 0:
        print(f"{options.images} images on {ranks} rank{'s' if ranks > 1 else ''}, {H.shape[0]:,} parameters")
        print("largest eigenvalues:", ", ".join(f"{value:.9f}" for value in found.eigenvalues.flip(0).tolist()))
        print(f"{found.products} products, residuals up to {found.residual.max().item():.1e}")
    if group:
        dist.barrier()  # No rank exits while another still needs it.
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except hodiff.HodiffError as error:
        sys.exit(str(error))
