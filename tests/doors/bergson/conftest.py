"""PyPI's torchvision and torchaudio are built for CUDA; transformers does without them if they seem to be missing."""

import sys

for name in ("torchaudio", "torchvision"):
    sys.modules[name] = None
