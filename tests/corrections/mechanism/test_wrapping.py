"""`corrected()` around functions of every kind: corrections act while the body runs, and only then."""

import asyncio
import functools
import inspect
import threading

import pytest
import torch
import torch.nn.functional as F

import hodiff
from hodiff.corrections import register, unregister

corrected = hodiff.corrected()
X = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)


def corrections_are_active():
    """Whether corrections act here, in which case layer_norm has another node."""
    return type(F.layer_norm(X, (3,)).grad_fn).__name__ != "NativeLayerNormBackward0"


def test_generator_body_is_corrected():
    @corrected
    def generator(first):
        try:
            second = yield first, corrections_are_active()
            yield second, corrections_are_active()
        except KeyError:
            yield "caught", corrections_are_active()
        return corrections_are_active()

    def caller():
        return (yield from generator(1))

    assert inspect.isgeneratorfunction(generator)
    running = caller()
    assert next(running) == (1, True)
    assert not corrections_are_active()
    assert running.send(2) == (2, True)
    assert running.throw(KeyError()) == ("caught", True)
    with pytest.raises(StopIteration) as end:
        next(running)
    assert end.value.value is True
    assert not corrections_are_active()


def test_closed_generator_is_corrected_in_its_finally():
    seen = []

    @corrected
    def generator():
        try:
            yield
        finally:
            seen.append(corrections_are_active())

    running = generator()
    next(running)
    running.close()
    assert seen == [True]
    assert not corrections_are_active()


def test_concurrent_coroutines_are_corrected_separately():
    @corrected
    async def inside(x):
        before = corrections_are_active()
        await asyncio.sleep(0.001)
        return x, before, corrections_are_active()

    async def outside():
        found = []
        for _ in range(4):
            await asyncio.sleep(0.0005)
            found.append(corrections_are_active())
        return any(found)

    async def main():
        return await asyncio.gather(inside(1), inside(2), outside())

    assert inspect.iscoroutinefunction(inside)
    assert asyncio.run(main()) == [(1, True, True), (2, True, True), False]


def test_error_in_a_coroutine_ends_the_corrections():
    @corrected
    async def fails():
        await asyncio.sleep(0)
        raise KeyError

    with pytest.raises(KeyError):
        asyncio.run(fails())
    assert not corrections_are_active()


def test_asynchronous_generator_body_is_corrected():
    seen = []

    @corrected
    async def generator():
        try:
            for i in range(3):
                await asyncio.sleep(0)
                seen.append(corrections_are_active())
                yield i
        except KeyError:
            yield "caught"
        finally:
            seen.append(corrections_are_active())

    async def main():
        found = []
        async for each in generator():
            found.append((each, corrections_are_active()))
        running = generator()
        await running.asend(None)
        assert await running.athrow(KeyError()) == "caught"
        await running.aclose()
        return found

    assert asyncio.run(main()) == [(0, False), (1, False), (2, False)]
    assert seen == [True] * 6


class Model:
    async def __call__(self):
        return corrections_are_active()


def test_decorator_without_parentheses():
    @hodiff.corrected
    def whether(*, sure):
        """Say whether."""
        return corrections_are_active(), sure

    assert whether(sure=2) == (True, 2)
    assert whether.__doc__ == "Say whether."
    assert not corrections_are_active()
    with pytest.raises(hodiff.InputError, match="expected a function, got Tensor"):
        hodiff.corrected(torch.ones(2))


def test_partials_modules_and_methods_are_wrapped():
    assert asyncio.run(corrected(Model())())
    assert corrected(functools.partial(corrections_are_active))()
    assert type(corrected(torch.nn.LayerNorm(3))(X).grad_fn).__name__ != "NativeLayerNormBackward0"

    class Holder:
        @staticmethod
        @corrected
        def beneath():
            return corrections_are_active()

        @classmethod
        @corrected
        def of_class(cls):
            return corrections_are_active()

    assert Holder.beneath()
    assert Holder.of_class()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Model, "got the class Model. Decorate the methods"),
        (staticmethod(corrections_are_active), "got staticmethod. Put it beneath @staticmethod"),
        (classmethod(corrections_are_active), "got classmethod. Put it beneath @classmethod"),
        (3, "got int. Pass a function"),
    ],
)
def test_rejects_non_functions(wrong, message):
    with pytest.raises(hodiff.InputError, match=message):
        corrected(wrong)


def test_exit_in_another_thread_is_rejected():
    """It would end a mode that is active in that thread, or find none to end."""
    mode, errors = hodiff.corrected(), []

    def leave():
        with hodiff.corrected():
            try:
                mode.__exit__(None, None, None)
            except hodiff.HodiffError as error:
                errors.append((str(error), corrections_are_active()))

    with mode:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        assert corrections_are_active()
    ((message, acted),) = errors
    assert "exited in a thread that did not enter it" in message
    assert acted
    assert not corrections_are_active()


def test_mode_may_be_shared_by_two_threads():
    mode, found, entered = hodiff.corrected(), [], threading.Barrier(2)

    def work():
        with mode:
            entered.wait(10)
            found.append(corrections_are_active())
        found.append(not corrections_are_active())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [True] * 4


def by_corrected(a, b):
    with hodiff.corrected():
        return torch.hypot(a, b) * 1


RULES = {
    "plainly": lambda a, b: torch.hypot(a, b) * 1,
    "inside corrected()": by_corrected,
    "decorated": hodiff.corrected()(lambda a, b: torch.hypot(a, b) * 1),
    "by a transform": lambda a, b: hodiff.jacobian(lambda x: torch.hypot(x, b))(a).sum(),
}


@pytest.mark.parametrize("how", RULES)
@pytest.mark.parametrize("covers", [None, lambda *_: True])
def test_rule_that_calls_its_own_function_reaches_torch(how, covers):
    register(torch.hypot, reason="a test", covers=covers)(RULES[how])
    three, four = torch.tensor([3.0], requires_grad=True), torch.tensor([4.0])
    try:
        for modes in (1, 2):
            function = torch.hypot
            for _ in range(modes):
                function = hodiff.corrected()(function)
            expected = 0.6 if how == "by a transform" else 5.0
            assert function(three, four).item() == pytest.approx(expected)
            assert type(function(three, four).grad_fn).__name__ != "HypotBackward0"
    finally:
        unregister(torch.hypot)


def test_rule_is_called_again_after_an_error():
    def once(a, b):
        if a.sum() < 0:
            raise KeyError
        return torch.zeros(())

    register(torch.hypot, reason="a test")(once)
    try:
        with hodiff.corrected():
            with pytest.raises(KeyError):
                torch.hypot(-X, X)
            assert torch.hypot(X, X) == 0
    finally:
        unregister(torch.hypot)
