"""DistributedDataParallel: its arguments, compressed communication, and fewer reductions a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

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
    ended with an error: each rank would update its weights by gradients of its own. Backward passes are counted, not
    forwards: of those some have none (an evaluation), and several may have one together (a GAN's).
    """

    def __init__(self, override: Override) -> None:
        from torch.utils.weak import WeakTensorKeyDictionary

        self.override = override
        self.every = int(override.value)
        self.by_script = False
        self.backwards: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Of each model, in training so far."""
        self.due: WeakSet[Any] = WeakSet()
        """Models that had a forward since their last backward."""
        self.parameters: Any = WeakTensorKeyDictionary()
        """A parameter -> reference to its model, of those whose reductions are put off."""
        self.models: WeakKeyDictionary[Any, tuple[int, list[ReferenceType[Any]]]] = WeakKeyDictionary()
        """An optimizer -> how many parameters it has, and references to their models."""

    def forward(self, original: Any) -> Any:
        @stands_for(original)
        def counting(model: Any, *args: Any, **kwargs: Any) -> Any:
            import torch

            if not model.training or not torch.is_grad_enabled() or self.by_script:
                return original(model, *args, **kwargs)
            if model.static_graph:  # torch ends such a job with an internal error
                self.override.not_applied("a model with static_graph=True cannot leave out reductions")
                return original(model, *args, **kwargs)
            if model not in self.backwards:
                self.backwards[model] = 0
                self.override.applied(1)
                for one in model.parameters():
                    self.parameters[one] = ref(model)
            model.require_backward_grad_sync = (self.backwards[model] + 1) % self.every == 0
            output = original(model, *args, **kwargs)
            self.await_backward(model, output)
            return output

        return counting

    def await_backward(self, model: Any, output: Any) -> None:
        """Count the backward of a forward's output. An output in which no tensor is found counts at once."""
        tensors = list(with_gradients(output))
        self.due.add(model)
        of_model = ref(model)

        def count(_: Any) -> None:
            found = of_model()
            if found is not None and found in self.due:
                self.due.discard(found)
                self.backwards[found] += 1

        for tensor in tensors:
            tensor.register_hook(count)
        if not tensors:
            count(None)

    def no_sync(self, original: Any) -> Any:
        @stands_for(original)
        def used(model: Any) -> Any:
            self.by_script = True
            self.override.not_applied("the script uses no_sync itself")
            return original(model)

        return used

    def around_step(self, optimizer: Any, *_: Any) -> None:
        """Before a step, and after it: its closure may be what goes backward."""
        if self.by_script:
            return
        for model in self.of(optimizer):
            backwards = self.backwards[model] % self.every
            if backwards:
                raise RuntimeError(
                    f"--set {self.override.key}={self.every}: the optimizer steps after "
                    f"{backwards} of {self.every} backward passes, whose gradients are not reduced; "
                    "give the number of micro-batches that the script accumulates"
                )

    def of(self, optimizer: Any) -> list[Any]:
        """The models whose parameters an optimizer has."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self.models.get(optimizer)
        if known is None or known[0] != count or not known[1]:
            every = [self.parameters.get(one) for group in optimizer.param_groups for one in group["params"]]
            known = self.models[optimizer] = (count, list(dict.fromkeys(one for one in every if one is not None)))
        return [model for one in known[1] if (model := one()) is not None]


def with_gradients(output: Any) -> Iterator[Any]:
    """Tensors of a forward's output that a backward can come from, in nested sequences and mappings."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, (list, tuple)):
        for one in output:
            yield from with_gradients(one)
    elif getattr(output, "requires_grad", False):
        yield output


def _accumulate(cls: Any, override: Override) -> Uninstall:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    accumulation = _Accumulation(override)
    # Never removed: torch iterates over these hooks while it calls them.
    register_optimizer_step_pre_hook(accumulation.around_step)
    register_optimizer_step_post_hook(accumulation.around_step)
    forward = replace_attribute(cls, "forward", accumulation.forward(cls.forward))
    return in_reverse([forward, replace_attribute(cls, "no_sync", accumulation.no_sync(cls.no_sync))])
