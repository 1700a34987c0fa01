"""What the pages of documentation need to be tested."""

import torch

# The page quotes torch 2.13 word by word.
collect_ignore = [] if torch.__version__.startswith("2.13.") else ["errors.md"]
