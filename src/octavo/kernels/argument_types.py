"""An argument of the wrong type is named; a right call pays for one more Python frame and nothing else."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

from octavo.errors import KernelArgumentError, shown

P = ParamSpec("P")
R = TypeVar("R")


def names_wrong_types(function: Callable[P, R]) -> Callable[P, R]:
    """Turn an AttributeError or TypeError inside `function` into a KernelArgumentError for the first argument
    that does not fit its annotation. Where all of them fit, the error is let through: it is ours.
    """

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (AttributeError, TypeError) as error:
            _explain(function, args, kwargs, error)
            raise

    return checked


def _explain(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> None:
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # an argument is missing or unknown, as Python's own message says
        return
    hints = typing.get_type_hints(function)
    for name, value in given.items():
        if not _fits(value, hints[name]):
            annotation = signature.parameters[name].annotation
            raise KernelArgumentError(
                f"{function.__name__}: {name} must be a value of type {annotation}, got {shown(value)} "
                f"({type(value).__name__})."
            ) from error


def _fits(value: object, hint: Any) -> bool:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        return isinstance(value, tuple | list) and len(value) == len(items) and all(map(_fits, value, items))
    if hint is float:
        hint = Real
    elif hint is int:
        hint = Integral
    return isinstance(value, hint)
