"""The running pass of a thread: Taylor mode installs one while a function runs, and removes it also after an error."""

import threading

import pytest
import torch

import hodiff
from hodiff.common.overriding import is_moving
from hodiff.common.running_pass import running_pass
from hodiff.taylor import jet

X = torch.ones(3, dtype=torch.float64)


def test_is_that_of_the_innermost_call():
    inside, around = [], []

    def inner(x):
        inside.append(running_pass())
        return x.sin().sum()

    def outer(x):
        before = running_pass()
        slope = jet(inner, (x,), ([x],))[1][0]
        around.append((before, running_pass()))
        return slope

    jet(outer, (X,), ([X],))
    assert None not in inside
    assert all(before is after is not None for before, after in around)
    assert not {*inside} & {before for before, _ in around}
    assert running_pass() is None


def test_ends_with_an_error():
    def fails(x):
        raise LookupError

    with pytest.raises(LookupError):
        hodiff.laplacian(fails)(X)
    assert running_pass() is None


def test_belongs_to_one_thread_but_its_values_move_in_all():
    seen = []

    def f(x):
        thread = threading.Thread(target=lambda: seen.append((running_pass(), is_moving(x))))
        thread.start()
        thread.join()
        return x.sin().sum()

    hodiff.laplacian(f)(X)
    assert seen[0] == (None, True)
