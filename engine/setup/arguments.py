"""What `initialize` is given, checked before anything is done with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn

PARAMETERS: Final = (
    "write model_parameters=model.parameters(), a list of parameters, or parameter groups such as "
    '[{"params": [...], "lr": 0.1}]'
)


def check_arguments(args: Any, model_parameters: Any) -> None:
    """Raise TypeError for an `args` without attributes, which cannot have a `deepspeed_config`, and for
    `model_parameters` that are no list or other iterable."""
    if isinstance(args, nn.Module):
        raise TypeError(f"initialize: args is a {type(args).__name__}, a module; write model= before it")
    if args is not None and not (hasattr(args, "__dict__") or hasattr(args, "__slots__")):
        raise TypeError(
            f"initialize: args={args!r}; pass what parser.parse_args() returns, or leave it out and write config="
        )
    many = isinstance(model_parameters, Iterable) and not isinstance(model_parameters, str | bytes | Mapping | Tensor)
    if model_parameters is not None and not many:
        raise TypeError(f"initialize: model_parameters is a {type(model_parameters).__name__}; {PARAMETERS}")


def parameter_groups(parameters: Sequence[Any]) -> list[dict[str, Any]]:
    """Parameters, or (name, parameter) pairs, or parameter groups, as parameter groups; one without
    parameters if there are none, as of a pipeline stage that has none. Raises TypeError for others."""
    if not any(isinstance(given, Mapping) for given in parameters):
        return [{"params": _plain(parameters)}]
    groups = []
    for number, group in enumerate(parameters):
        if not isinstance(group, Mapping) or "params" not in group:
            what = "a dict without 'params'" if isinstance(group, Mapping) else f"a {type(group).__name__}"
            raise TypeError(f"initialize: model_parameters[{number}] is {what} among parameter groups; {PARAMETERS}")
        groups.append({**group, "params": _plain(group["params"], f"[{number}]['params']")})
    return groups


def _plain(parameters: Any, where: str = "") -> list[Any]:
    """The parameters in what is one, or several. `where` that is, for the error."""
    if not isinstance(parameters, Iterable):
        raise TypeError(f"initialize: model_parameters{where} is a {type(parameters).__name__}; {PARAMETERS}")
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    plain = [item[1] if isinstance(item, tuple) and len(item) == 2 else item for item in listed]
    for number, param in enumerate(plain):
        if not isinstance(param, Tensor):
            raise TypeError(
                f"initialize: model_parameters{where}[{number}] is a {type(param).__name__}, no parameter; {PARAMETERS}"
            )
    return plain
