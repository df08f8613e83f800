"""Other values for arguments of a class or function of the job's frameworks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..hooking.errors import count_error
from ..hooking.uninstall import Uninstall, replace_attribute
from ..hooking.wrap import stands_for
from .override import Override

Arguments = dict[str, Any]
Adapt = Callable[[Arguments, Mapping[str, Override]], Mapping[str, Any]]
"""From a call's arguments by name (with those left out that were not given), and the overrides, to the values that
take the place of the job's; may tell an override that it is not applied."""


def given(_: Arguments, overrides: Mapping[str, Override]) -> dict[str, Any]:
    """The values as they were asked for."""
    return {name: override.value for name, override in overrides.items()}


def override_arguments(
    place: Any, name: str, overrides: Mapping[str, Override], what: str, adapt: Adapt = given
) -> Uninstall:
    """Call `place.name` with other values from now on.

    place: a module or class; name: of a function in it, or `__init__`
    overrides: by the name of the argument
    what: it is called in what is told of arguments that it has not
    """
    call = getattr(place, name)
    signature = inspect.signature(call)
    parameters = signature.parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    for argument, override in overrides.items():
        if argument not in parameters and not takes_any:
            override.has_none(f"{what} has no argument", parameters)
    known = {argument: one for argument, one in overrides.items() if argument in parameters or takes_any}
    if not known:
        return lambda: None

    def changed(args: tuple[Any, ...], kwargs: Arguments) -> tuple[tuple[Any, ...], Arguments]:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # the call itself will say so
            return args, kwargs
        for argument, value in adapt(bound.arguments, known).items():
            put(bound, argument, value, known.get(argument))
        return bound.args, bound.kwargs

    @stands_for(call)
    def overridden(*args: Any, **kwargs: Any) -> Any:
        try:
            args, kwargs = changed(args, kwargs)
        except Exception as error:
            count_error(f"--set for {what}", error)
        return call(*args, **kwargs)

    return replace_attribute(place, name, overridden)


def put(bound: inspect.BoundArguments, argument: str, value: Any, override: Override | None) -> None:
    """Give a bound argument another value. override: told of it; None: nobody is."""
    parameter = bound.signature.parameters.get(argument)
    if parameter is not None:
        was = bound.arguments.get(argument, parameter.default)
        bound.arguments[argument] = value
    else:  # of its **kwargs
        rest = next(n for n, p in bound.signature.parameters.items() if p.kind is inspect.Parameter.VAR_KEYWORD)
        was = bound.arguments.get(rest, {}).get(argument)
        bound.arguments[rest] = {**bound.arguments.get(rest, {}), argument: value}
    if override is not None and (was != value or not override.told):  # told of the outermost class's arguments
        override.applied(was)
