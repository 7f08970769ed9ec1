"""Numbers of a traced call as constants of its code.

Whatever a traced function reads from its closure costs guards, which run in front of the compiled graph
in every step: three for a number. A constant of the code costs none of its own. The code is the
template's in all else; a function with other numbers is other code, so that Dynamo traces it anew.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

KEY = "moetrace key"
SITE = "moetrace site"
INDEX = "moetrace index"


def with_numbers(template: Callable[..., Any], numbers: dict[str, int]) -> Callable[..., Any]:
    """The template with numbers in place of constants of these names, written out in its code."""
    function = cast(FunctionType, template)
    code = function.__code__
    constants = tuple(
        numbers.get(constant, constant) if isinstance(constant, str) else constant
        for constant in code.co_consts
    )
    result = FunctionType(
        code.replace(co_consts=constants),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    result.__kwdefaults__ = function.__kwdefaults__
    return result
