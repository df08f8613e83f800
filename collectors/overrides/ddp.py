"""DistributedDataParallel: its arguments, compressed communication, and fewer reductions a step."""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

from ..hooking.constructors import after_init
from ..hooking.uninstall import Uninstall, in_reverse, replace_attribute
from ..hooking.wrap import stands_for
from .arguments import override_arguments
from .override import Override

OWN: Final = ("comm_hook", "accumulate")
"""Keys that are no arguments of its constructor."""
HOOKS: Final = {"bf16": "bf16_compress_hook", "fp16": "fp16_compress_hook"}
"""Number format -> the function of torch's ddp_comm_hooks.default_hooks."""


def install(overrides: list[Override]) -> Uninstall:
    """Apply them to every DistributedDataParallel made from now on."""
    from torch.nn.parallel import DistributedDataParallel

    own = {override.name: override for override in overrides if override.name in OWN}
    arguments = {override.name: override for override in overrides if override.name not in OWN}
    installed = []
    if arguments:
        installed.append(override_arguments(DistributedDataParallel, "__init__", arguments, "DistributedDataParallel"))
    if "comm_hook" in own:
        installed.append(_compress(DistributedDataParallel, own["comm_hook"]))
    if "accumulate" in own:
        installed.append(_accumulate(DistributedDataParallel, own["accumulate"]))
    return in_reverse(installed)


def _compress(cls: Any, override: Override) -> Uninstall:
    """Gradients travel as bf16 or fp16."""

    def register(model: Any, *_: Any, **__: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hook = getattr(default_hooks, HOOKS[override.value], None)
        if hook is None:
            override.not_applied(f"this torch has no hook for {override.value}")
            return
        try:
            model.register_comm_hook(None, hook)
        except (TypeError, ValueError, RuntimeError) as error:  # of another backend, or the script has one
            override.not_applied(str(error))
            return
        override.applied(None)

    return after_init(cls, register, f"--set {override.key}", watches=False)


class _Accumulation:
    """Gradients are reduced in every Nth backward only, as `no_sync` around the others has it.

    A script that uses `no_sync` itself is left alone. One whose optimizer steps at another time than after the Nth is
    ended with an error: each rank would update its weights by gradients of its own.
    """

    def __init__(self, override: Override) -> None:
        self.override = override
        self.every = int(override.value)
        self.by_script = False
        self.forwards: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Of each model, in training so far."""
        self.parameters: dict[int, Any] = {}
        """id of a parameter -> its model, of those whose reductions are put off."""

    def forward(self, original: Any) -> Any:
        @stands_for(original)
        def counting(model: Any, *args: Any, **kwargs: Any) -> Any:
            import torch

            if model.training and torch.is_grad_enabled() and not self.by_script:
                number = self.forwards.get(model, 0)
                if number == 0:
                    self.override.applied(1)
                    self.parameters.update((id(one), model) for one in model.parameters())
                self.forwards[model] = number + 1
                model.require_backward_grad_sync = (number + 1) % self.every == 0
            return original(model, *args, **kwargs)

        return counting

    def no_sync(self, original: Any) -> Any:
        @stands_for(original)
        def used(model: Any) -> Any:
            self.by_script = True
            self.override.not_applied("the script uses no_sync itself")
            return original(model)

        return used

    def before_step(self, optimizer: Any, *_: Any) -> None:
        first = next((one for group in optimizer.param_groups for one in group["params"]), None)
        model = self.parameters.get(id(first))
        if model is None or self.by_script:
            return
        backwards = self.forwards[model] % self.every
        if backwards == 0:
            return
        raise RuntimeError(
            f"--set {self.override.key}={self.every}: the optimizer steps after "
            f"{backwards} of {self.every} backward passes, whose gradients are not reduced; "
            "give the number of micro-batches that the script accumulates"
        )


def _accumulate(cls: Any, override: Override) -> Uninstall:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    accumulation = _Accumulation(override)
    register_optimizer_step_pre_hook(accumulation.before_step)  # never removed: torch iterates over them
    forward = replace_attribute(cls, "forward", accumulation.forward(cls.forward))
    return in_reverse([forward, replace_attribute(cls, "no_sync", accumulation.no_sync(cls.no_sync))])
