"""Tests that families of corrections share. The test file of a family derives a class from `Contract`, with its table.

Two kinds of tables: if `order` is 2, all routes of all cases are compared with differences to third order, and the slow
test batches and compiles to second order. If `order` is 3, the slow test batches and compiles to third order, and the
quick cases are compared to second order.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import pytest
from corrections.against_torch import FAILURES, assert_every_route, route_statuses, same_error
from slow_cases import backend_of, slow_except

import hodiff

Function = Callable[..., Any]


class Contract:
    """Attributes are names of cases, unless they say otherwise."""

    # The functions and their inputs
    cases: ClassVar[Mapping[str, tuple[Function, Any]]]
    order: ClassVar[int] = 2
    # Cases of which the quick tests compare every `one_in`-th
    quick: ClassVar[Collection[str] | None] = None
    one_in: ClassVar[int] = 1
    # Cases that the slow test compiles: by default, every tenth of those that Dynamo supports
    compiled: ClassVar[Collection[str] | None] = None
    not_compiled: ClassVar[Collection[str]] = ()
    not_batched: ClassVar[Collection[str]] = ()
    # Cases in which torch alone fails, of which the quick tests try every `wrong_one_in`-th; how, and to which order
    wrong: ClassVar[Collection[str]] = ()
    wrong_one_in: ClassVar[int] = 1
    failures: ClassVar[Collection[str]] = FAILURES
    order_of_failures: ClassVar[int] = 2
    # Calls that torch refuses, and their inputs
    errors: ClassVar[Mapping[str, Function]] = {}
    error_inputs: ClassVar[tuple[Any, ...]] = ()

    def __init_subclass__(cls) -> None:
        for table, test in ((cls.wrong, "test_torch_alone_is_wrong"), (cls.errors, "test_errors_match_torch")):
            if not table:
                setattr(cls, test, None)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize the tests by the tables of the class."""
        chosen = [name for name in self.cases if self.quick is None or name in self.quick][:: self.one_in]
        tables = {
            "test_derivatives_match_differences_by_every_route": slow_except(
                self.cases if self.order == 2 else chosen, chosen
            ),
            "test_vmapped_and_compiled_derivatives_match_differences": self.cases,
            "test_torch_alone_is_wrong": slow_except(self.wrong, tuple(self.wrong)[:: self.wrong_one_in]),
            "test_errors_match_torch": self.errors,
        }
        metafunc.parametrize("case", tables[metafunc.function.__name__])

    def test_derivatives_match_differences_by_every_route(self, case: str) -> None:
        f, inputs = self.cases[case]
        if self.order == 2:
            assert_every_route(f, inputs)
        else:
            hodiff.assert_differentiable(hodiff.corrected()(f), inputs, vmap=False, scipy=False)

    @pytest.mark.slow
    def test_vmapped_and_compiled_derivatives_match_differences(self, case: str) -> None:
        f, inputs = self.cases[case]
        supported = [each for each in self.cases if each not in self.not_compiled]
        hodiff.assert_differentiable(
            hodiff.corrected()(f),
            inputs,
            order=self.order,
            vmap=case not in self.not_batched,
            compile=backend_of(case, supported) if self.compiled is None else case in self.compiled and "aot_eager",
            scipy=False,
        )

    def test_torch_alone_is_wrong(self, case: str) -> None:
        """The tests above would prove nothing if torch alone were right."""
        f, inputs = self.cases[case]
        assert set(self.failures) & set(route_statuses(f, inputs, self.order_of_failures))

    def test_errors_match_torch(self, case: str) -> None:
        same_error(self.errors[case], *self.error_inputs)
