"""The library's Functions, at the points and with the options of their catalogue."""

import torch
from functions.catalogue import CASES
from zoo.specimen import Right


def _specimen(case):
    options = {**case.check_options, "vmap": case.vmap}
    if case.surrogate is not None:
        options["approximate"] = True
    return Right(f"hodiff.{case.name}", case.function, case.draw(torch.float64), options)


# One setting of each function; the contract of the catalogue checks the others.
SPECIMENS = [_specimen(case) for case in CASES if "-" not in case.name]
