"""How much an optimizer is going to keep, before it has kept anything."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..optim.build import ELEMENTWISE
from ..optim.lamb import Lamb
from ..optim.lion import Lion


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
