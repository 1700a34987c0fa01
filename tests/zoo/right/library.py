"""The library's Functions, with the inputs and options of the catalogue."""

import torch
from functions.catalogue import CASES
from zoo.specimen import Right


def _specimen(case):
    options = {**case.check_options, "vmap": case.vmap}
    if case.surrogate is not None:
        options["approximate"] = True
    return Right(f"hodiff.{case.name}", case.function, case.draw(torch.float64), options)


# One setting of each Function; `tests/functions/test_contract.py` checks the other settings.
SPECIMENS = [_specimen(case) for case in CASES if "-" not in case.name]
