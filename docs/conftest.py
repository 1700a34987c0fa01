"""What the pages of documentation need to be tested."""

import torch

# Errors quotes torch 2.13 word by word. The site is built by a program that needs the extra `docs`.
collect_ignore = ["site_builder", *([] if torch.__version__.startswith("2.13.") else ["reference/errors.md"])]
