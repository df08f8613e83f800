"""The optimizer of a config's `optimizer` section."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm.comm import Comm
from ..config.keys import checked
from ..config.optimizer import OPTIMIZERS
from .muon import Muon
from .onebit import OneBitAdam
from .tiled import Lamb, Lion, Shards, comm_of

Groups = list[dict[str, Any]]

FUSED_ON: Final = ("cpu", "cuda", "xpu", "mps")
"""Devices for which torch has fused Adam, AdamW and SGD."""

ELEMENTWISE: Final = tuple(
    getattr(torch.optim, name)
    for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)  # fmt: skip
"""torch's optimizers that treat each element by itself, so that they can step shards of parameters."""


OURS: Final = ("Lamb", "Lion", "Muon", "OneBitAdam")
"""Optimizers whose options have no defaults but those of the configuration."""

HALVES: Final = (
    (True, "muon_lr", 0.02, ("momentum", "weight_decay")),
    (False, "adam_lr", 3e-4, ("betas", "eps", "weight_decay")),
)
"""Of Muon's two: whether it steps hidden matrices, the name of its own learning rate, DeepSpeed's, and its options."""


def build(
    type: str,
    params: Mapping[str, Any],
    groups: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    *,
    shards: Shards | None = None,
    comm: Comm | None = None,
) -> Optimizer:
    """The optimizer `type` with the options `params` of a config, which has checked them, over masters or parameter
    groups of masters.

    Options of a group win over `params`. `shards` describes masters that are shards to LAMB and Muon; `comm` is of
    the data-parallel ranks, for OneBitAdam. Raises ValueError for values that the optimizer cannot take.
    """
    if type in OURS:
        params = checked(OPTIMIZERS[type], params, "optimizer.params").arguments()
    options: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
    make: dict[str, Callable[[Groups], Optimizer]] = {
        "Adam": partial(_adam, options),
        "AdamW": partial(_adam, options),
        "Lamb": partial(Lamb, options=options, comm=comm_of(shards or {})),
        "Lion": partial(Lion, options=options),
        "Muon": partial(_muon, options, shards or {}),
        "OneBitAdam": partial(OneBitAdam, options=options, comm=comm),
        "SGD": partial(_sgd, options),
    }
    return (make.get(type) or partial(getattr(torch.optim, type), **options))(_as_groups(groups))


def _sgd(options: dict[str, Any], groups: Groups) -> Optimizer:
    """torch's SGD. Its fused implementation takes momentum for all parameters of a step or for none, so where some get
    their first gradient later than others they are given zeros, which with `dampening` would not be what torch does."""
    if not options.get("dampening"):
        _fuse(options, groups)
    sgd = torch.optim.SGD(groups, **options)
    if sgd.defaults["fused"]:
        sgd.register_step_pre_hook(_begin_momentum)
    return sgd


def _begin_momentum(sgd: Optimizer, *_: Any) -> None:
    """Give zeros as momentum to parameters that have none yet, in groups in which others have it."""
    if len(sgd.state) == sum(len(group["params"]) for group in sgd.param_groups):
        return
    for group in sgd.param_groups:
        stepped = [param for param in group["params"] if param.grad is not None] if group["momentum"] else []
        new = [param for param in stepped if sgd.state[param].get("momentum_buffer") is None]
        if len(new) < len(stepped):
            for param in new:
                sgd.state[param]["momentum_buffer"] = torch.zeros_like(param)


def _adam(options: dict[str, Any], groups: Groups) -> Optimizer:
    """torch's Adam or AdamW as DeepSpeed understands them: `Adam` is AdamW unless `adam_w_mode` is false, and weight
    decay is 0 by default.
    """
    adam = torch.optim.AdamW if options.pop("adam_w_mode", True) else torch.optim.Adam
    options.setdefault("weight_decay", 0.0)
    corrected = options.pop("bias_correction", True)
    _fuse(options, groups)
    optimizer = adam(groups, **options)
    if not corrected:
        optimizer.register_step_pre_hook(_start_at_infinity)
    return optimizer


def _start_at_infinity(optimizer: Optimizer, *_: Any) -> None:
    """Adam without bias correction: b^t is 0 for a parameter whose step count t is infinite, now and later."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and not optimizer.state[param]:
                on_device = group["fused"] or group["capturable"]
                optimizer.state[param] = {
                    "step": torch.full((), torch.inf, device=param.device if on_device else "cpu"),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                    **({"max_exp_avg_sq": torch.zeros_like(param)} if group["amsgrad"] else {}),
                }


def _muon(options: dict[str, Any], shards: Shards, groups: Groups) -> Optimizer:
    """Every group falls into the matrices that Muon steps and the rest; `muon_lr` and `adam_lr` go before `lr`."""
    adam = torch.optim.AdamW if options.pop("adam_w_mode", True) else torch.optim.Adam
    rates = {key: options.pop(key, None) for key in ("lr", "muon_lr", "adam_lr")}
    if any(param not in shards for group in groups for param in group["params"]):
        raise ValueError("Muon must know of every master whether it is a hidden matrix: give `shards` for all of them")
    halves: Groups = []
    for group in groups:
        for use_muon, own_rate, default, keys in HALVES:
            # Both halves even if one is empty, so that all stages of a pipeline have the same groups.
            params = [param for param in group["params"] if shards[param].muon is use_muon]
            rate = next((rates[key] for key in (own_rate, "lr") if rates[key] is not None), default)
            shared = {key: options[key] for key in keys}
            halves.append({**shared, "lr": rate, **group, "params": params, "use_muon": use_muon})
    return Muon(halves, adam, fused=_can_fuse(groups), shards=shards)


def _fuse(options: dict[str, Any], groups: Groups) -> None:
    """Have torch's fused implementation unless the config says otherwise."""
    if not options.keys() & {"fused", "foreach", "differentiable"}:
        options["fused"] = _can_fuse(groups)


def _can_fuse(groups: Groups) -> bool:
    return all(
        param.device.type in FUSED_ON and param.is_floating_point() for group in groups for param in group["params"]
    )


def _as_groups(groups: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> Groups:
    """Copies, because optimizers write their defaults into the groups they get."""
    given: list[Any] = list(groups)
    if given and not isinstance(given[0], dict):
        return [{"params": given}]
    return [{**group, "params": list(group["params"])} for group in given]


@torch.no_grad()
def bytes_per_element(optimizer: Optimizer) -> dict[nn.Parameter, int]:
    """Bytes of state for each element of each master, as one step of a master of two elements shows.

    Empty for an optimizer that is not known to step any tensor by itself: its needs are seen at its first step.
    """
    if type(optimizer) not in (*ELEMENTWISE, Lion, Lamb):
        return {}
    found = {}
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
        trial = nn.Parameter(torch.zeros(2, dtype=group["params"][0].dtype))
        trial.grad = torch.zeros_like(trial)
        twin = object.__new__(type(optimizer))
        vars(twin).update(vars(optimizer))
        vars(twin).pop("step", None)  # a scheduler's, which counts steps of the real one
        twin.param_groups = [{**group, "params": [trial]}]
        twin.state = type(optimizer.state)(dict)
        inspect.unwrap(type(twin).step)(twin)  # without the hooks, which would take it for a step of the training
        states = [value for value in twin.state[trial].values() if isinstance(value, Tensor) and value.shape == (2,)]
        found.update(dict.fromkeys(group["params"], sum(value.element_size() for value in states)))
    return found
