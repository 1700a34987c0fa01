"""Tests of the global lock: which threads wait for it, and which threads must not wait."""

import os
import signal
import threading

import pytest
import torch

from hodiff.torch_internals.threads import one_thread_at_a_time


def in_another_thread(call, timeout=300.0):
    """Whether a call in another thread ends within the timeout."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout)
    return not thread.is_alive()


def take_lock():
    with one_thread_at_a_time():
        pass


def test_other_threads_wait_for_the_lock():
    with one_thread_at_a_time(), one_thread_at_a_time():
        assert not in_another_thread(take_lock, 0.1)
    assert in_another_thread(take_lock)


class Deep(torch.autograd.Function):
    """A backward pass inside a backward pass, nested so deeply that autograd continues in its own threads."""

    seen = ""

    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if ctx.depth == 0:
            Deep.seen = threading.current_thread().name
            take_lock()
            return g, None
        with torch.enable_grad():
            x = g.detach().requires_grad_()
            return torch.autograd.grad(Deep.apply(x, ctx.depth - 1), x)[0], None


def test_autograd_threads_do_not_wait():
    """Threads of autograd work for a thread that waits for them and may hold the lock, as on a GPU."""

    def backward():
        x = torch.ones((), requires_grad=True)
        with one_thread_at_a_time():
            Deep.apply(x, 100).backward()

    assert in_another_thread(backward)
    assert Deep.seen.startswith("Dummy")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_forked_process_does_not_wait():
    holding, done = threading.Event(), threading.Event()

    def hold():
        with one_thread_at_a_time():
            holding.set()
            done.wait()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert holding.wait(20.0)
    child = os.fork()
    if child == 0:
        signal.alarm(5)  # end the child process if it waits
        take_lock()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
