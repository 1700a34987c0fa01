"""Image models."""

import torch
from models.specimen import Architecture, Built, noise
from torch import nn

MENDED = ("HD410",)


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4
    )
    return Built(ViTForImageClassification(config), (noise(2, 3, 8, 8),))


def resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    return Built(ResNetForImageClassification(config), (noise(2, 3, 16, 16),))


def convnext():
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=16)
    return Built(ConvNextForImageClassification(config), (noise(2, 3, 16, 16),))


def efficientnet():
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    config = EfficientNetConfig(
        image_size=16,
        width_coefficient=0.25,
        depth_coefficient=0.5,
        kernel_sizes=[3, 3],
        in_channels=[32, 16],
        out_channels=[16, 24],
        depthwise_padding=[],
        strides=[1, 2],
        num_block_repeats=[1, 1],
        expand_ratios=[1, 2],
        hidden_dim=320,
    )
    return Built(EfficientNetForImageClassification(config), (noise(2, 3, 16, 16),))


def swin():
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[2, 1], num_heads=[2, 2], window_size=4)
    return Built(SwinForImageClassification(config), (noise(1, 3, 16, 16),))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.down, self.up = nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        first = nn.functional.silu(self.norm(self.first(x)))
        return self.last(torch.cat([first, self.up(nn.functional.silu(self.down(first)))], 1))


def unet():
    return Built(UNet(), (noise(1, 1, 8, 8),))


ARCHITECTURES = [
    Architecture("ViT", vit, "transformers", warnings=MENDED),
    Architecture("ResNet", resnet, "transformers"),
    Architecture("ConvNeXt", convnext, "transformers", warnings=MENDED),
    Architecture("EfficientNet", efficientnet, "transformers"),
    Architecture("Swin", swin, "transformers", warnings=MENDED),
    Architecture("U-Net", unet, quick=True),
]
