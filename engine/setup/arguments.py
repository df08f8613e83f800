"""What `initialize` is given: refused before anything is opened, where it cannot be."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from ..config import Config
from ..tensor.sharding import sharded_parameters
from ..zero.init import EarlyParam
from ..zero.shard import find_sharded
from ..zero.validate import abandoned, refuse_lazy

PARAMETERS: Final = (
    "write model_parameters=model.parameters(), a list of parameters, or parameter groups such as "
    '[{"params": [...], "lr": 0.1}]'
)


def check_model(model: Any) -> nn.Module:
    """The model. Raises ValueError or TypeError for what is none, or cannot be made an engine of."""
    if model is None:
        raise ValueError("initialize: no model; pass model=")
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}; make one of it" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TypeError(f"initialize: model must be an nn.Module, and is {what}")
    refuse_lazy(model)
    if not all(isinstance(find_sharded(param), EarlyParam | None) for param in model.parameters()):
        raise ValueError(
            "initialize: the model has an engine already; call its destroy() first, on all ranks, or, where "
            "nothing refers to that engine any more, build the model anew"
        )
    if (left := abandoned(model)) is not None:
        raise ValueError(
            f"initialize: {left} is sharded (ZeRO stage 3), by an engine that is gone; build the model anew"
        )
    for name, _, _ in sharded_parameters(model):  # which destroy() does not make whole again
        raise ValueError(
            f"initialize: {name} is sharded over tensor-parallel ranks already, by an engine before: build the model "
            "anew, and load_checkpoint what that one saved"
        )
    return model


def check_arguments(args: Any, optimizer: Any, model_parameters: Any, unsupported: Mapping[str, Any]) -> None:
    """Raise TypeError for an `args` without attributes, which cannot have a `deepspeed_config`, for an `optimizer` that
    is none, and for `model_parameters` that are no list or other iterable; ValueError for what is `unsupported`."""
    if isinstance(args, nn.Module):
        raise TypeError(f"initialize: args is a {type(args).__name__}, a module; write model= before it")
    if args is not None and not (isinstance(args, Mapping) or hasattr(args, "__dict__") or hasattr(args, "__slots__")):
        raise TypeError(
            f"initialize: args={args!r}; pass what parser.parse_args() returns, or leave it out and write config="
        )
    many = isinstance(model_parameters, Iterable) and not isinstance(model_parameters, str | bytes | Mapping | Tensor)
    if model_parameters is not None and not many:
        raise TypeError(f"initialize: model_parameters is a {type(model_parameters).__name__}; {PARAMETERS}")
    for name in (name for name, given in unsupported.items() if given is not None):
        raise ValueError(
            f"initialize: {name} is not supported: ranks are divided by the configuration; write "
            '"tensor_parallel": {"autotp_size": ...}, "pipeline": {"stages": ...} and "sequence_parallel_size" there, '
            "and leave it out"
        )
    if not (optimizer is None or callable(optimizer) or isinstance(optimizer, Optimizer)):
        raise TypeError(f"initialize: optimizer is a {type(optimizer).__name__}; pass a torch.optim.Optimizer")


def config_of(args: Any, config: Any, config_params: Any) -> Any:
    """The one of them that was passed. Raises ValueError for none, or several."""
    every = {
        "config": config, "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }  # fmt: skip
    given = {name: value for name, value in every.items() if value is not None}
    if not given:
        raise ValueError("initialize: no configuration; pass config= (a dict or the path of a JSON file)")
    if len(given) > 1:
        raise ValueError(f"initialize: {' and '.join(given)}: pass one of them")
    return next(iter(given.values()))


def check_parameters(model: nn.Module, config: Config) -> None:
    """Raise ValueError for what no setting of the engine can train."""
    for name, param in model.named_parameters():
        if param.is_complex():
            raise ValueError(f"initialize: {name} is complex, which the engine does not train; keep its real view")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and config.zero_optimization.stage >= 2:
            raise ValueError(
                f"initialize: {name or 'the model'} is an embedding with sparse=True, and its gradients travel as rows "
                "in ZeRO stages 0 and 1 only: write one of these, or sparse=False"
            )


def listed_parameters(given: Iterable[Any] | None, model: nn.Module) -> list[Any] | None:
    """What was passed as `model_parameters`. Raises ValueError for those that `model` does not have."""
    if given is None:
        return None
    listed = list(given)
    if any(isinstance(item, Mapping) for item in listed):
        listed = parameter_groups(listed)  # whose parameters may be a generator's
    known = set(model.parameters())
    for param in [p for group in parameter_groups(listed) for p in group["params"]]:
        if param not in known:
            raise ValueError(
                f"initialize: model_parameters has a parameter of shape {tuple(param.shape)} that the model does not "
                "have; pass those of the same model"
            )
    if not listed and any(param.requires_grad for param in known):
        raise ValueError(
            "initialize: model_parameters is empty, and the model has parameters to train: leave it out, or list them "
            "when the model has its layers (a PipelineModule without num_stages has none before)"
        )
    return listed


def in_vain(optimizer: Any, scheduler: Any, config: Config) -> Iterator[str]:
    """What the configuration says without effect beside what the script passes."""
    if optimizer is not None and config.optimizer is not None:
        yield "optimizer: has no effect; the script passes its own to initialize"
    if scheduler is not None and config.scheduler is not None:
        yield "scheduler: has no effect; the script passes its own to initialize"
    elif optimizer is None and config.optimizer is None and config.scheduler is not None:
        yield 'scheduler: has no effect; there is no optimizer: write "optimizer" too, or pass one to initialize'


def compare(listed: list[dict[str, Any]], stepped: list[dict[str, Any]]) -> None:
    """Warn if `model_parameters` are others than those of the script's optimizer, which counts."""
    ours, theirs = ({id(p) for group in groups for p in group["params"] if p.requires_grad}
                    for groups in (listed, stepped))  # fmt: skip
    if ours != theirs:
        warnings.warn(
            f"initialize: model_parameters has {len(ours - theirs)} parameters to train that optimizer= has not, and "
            f"not {len(theirs - ours)} that it has; it has no effect: the optimizer's own are trained",
            stacklevel=5,
        )


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
