"""Activation checkpointing: blocks of a model whose activations are recomputed in backward instead of kept.

A policy finds the blocks and wraps each one's forward. The wrapping is inside the block's `__call__`, not around it, so

- the block's own hooks run once, in forward: what a user's hook does to the arguments is not done to them again;
- hooks of modules inside the block run in the recomputation too, and so ZeRO stage 3 fetches their parameters for it;
- parameters of the block itself must be whole before it is recomputed. Stage 3 fetches them when the gradient of the
  block's output arrives, which is before backward asks for anything inside.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from dsprof.words import did_you_mean, fits

from ..config.config import ActivationCheckpointingConfig
from ..forward import Undo, last_first, wrap_forward
from ..hooks import Hooks
from ..monitors.flops import has_formula

Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]
"""What the forward runs in, and what the recomputation runs in."""


# --- policies


@dataclass(frozen=True, kw_only=True)
class Full:
    """Keep the inputs of every block, and recompute what is inside."""

    blocks: Sequence[str] | None = None
    """Names of the blocks; `*` stands for any one part of a name, as in `encoder.layers.*`. None: find them.
    Without any, nothing is recomputed."""

    on_host: bool = False
    """Keep the blocks' inputs in host memory until they are needed."""

    every: int = 1
    """Only every so many-th block; the others keep their activations."""

    def apply(self, model: nn.Module, hooks: Hooks) -> Undo:
        """Wrap the blocks of `model`. Raises ValueError if it is not clear which modules they are, or if there are not
        `every` of them."""
        found = find_blocks(model) if self.blocks is None else named_blocks(model, self.blocks)
        if not 1 <= self.every <= max(1, len(found)):
            raise ValueError(
                f"every k-th block with k = {self.every}: the model has {len(found)} blocks; write 1 to {len(found)}"
            )
        undos = []
        for name in list(found)[self.every - 1 :: self.every]:
            region = Region(hooks, name, self.on_host, self.contexts())
            undos.append(wrap_forward(found[name], uncompiled(region), name, "activation checkpointing was applied"))
        return last_first(undos)

    def contexts(self) -> Callable[[], Contexts]:
        """What makes the contexts for one forward of a block, and for its recomputation."""
        return noop_context_fn


@dataclass(frozen=True, kw_only=True)
class Selective(Full):
    """Keep what is expensive to compute, and recompute what is cheap.

    Kept, beside a block's inputs, are the outputs of the operators that have a flop formula: matrix products,
    convolutions, attention. Recomputed are the others, such as norms, activation functions and dropout, whose outputs
    take as much memory and little time. Kept outputs stay on the device, also with `on_host`. One that the block
    changes in place (`nn.ReLU(inplace=True)`) is an error in backward, and backward can run but once.
    """

    def contexts(self) -> Callable[[], Contexts]:
        def fresh() -> Contexts:
            keep, reuse = create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)
            return _ExpensiveOnly(keep), _ExpensiveOnly(reuse)

        return fresh


def from_config(section: ActivationCheckpointingConfig) -> Full:
    """The policy that `activation_checkpointing` names."""
    if section.policy == "none":
        return Full(blocks=())
    kind = Selective if section.policy == "selective" else Full
    every = section.every if section.policy == "every_k" else 1
    return kind(blocks=section.blocks, on_host=section.cpu_checkpointing, every=every)


class _ExpensiveOnly(TorchDispatchMode):
    """Shows `mode` the expensive operators alone.

    torch's mode wants forward and recomputation to run the very same operators, but module hooks may not: a parameter
    that is fetched in one of them can be there already in the other.
    """

    supports_higher_order_operators = True

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _is_expensive(func):
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


_is_expensive: Final = functools.cache(has_formula)


# --- one checkpointed region


@dataclass(frozen=True)
class Region:
    """A part of the computation that keeps its arguments and is run again in backward.

    Reported as a `phase` span `recompute` on lane `autograd`; with `on_host` as `copy` spans `to_host`, and `to_device`
    where the activation comes from a GPU.
    """

    hooks: Hooks
    name: str | None = None
    on_host: bool = False
    contexts: Callable[[], Contexts] = noop_context_fn

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `function` returns."""
        # Only what torch.utils.checkpoint gets as positional tensors does it save as autograd does.
        leaves, structure = pytree.tree_flatten((args, kwargs))
        given = [(args, kwargs)]  # the forward gets these: it may write to a list or a dictionary among them

        def run(*leaves: Any) -> Any:
            if given:
                args, kwargs = given.pop()
                return function(*args, **kwargs)
            args, kwargs = pytree.tree_unflatten(leaves, structure)
            with self.hooks.span("phase", "recompute", lane="autograd", module=self.name):
                return function(*args, **kwargs)

        del args, kwargs
        with saved_tensors_hooks(self._to_host, self._to_device) if self.on_host else nullcontext():
            return checkpoint(run, *leaves, use_reentrant=False, context_fn=self.contexts)

    def _to_host(self, tensor: Tensor) -> tuple[torch.device, Tensor]:
        if not tensor.is_floating_point() or tensor.layout is not torch.strided or not tensor.numel():
            return tensor.device, tensor
        with self.hooks.span("copy", "to_host", module=self.name, purpose="activation", bytes=tensor.nbytes):
            host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            host.copy_(tensor, non_blocking=tensor.is_cuda)
        return tensor.device, host

    def _to_device(self, saved: tuple[torch.device, Tensor]) -> Tensor:
        device, kept = saved
        if kept.device == device:
            return kept
        with self.hooks.span(
            "copy", "to_device", lane="autograd", module=self.name, purpose="activation", bytes=kept.nbytes
        ):
            return kept.to(device, non_blocking=True)


def uncompiled(region: Region) -> Callable[..., Any]:
    """`region` for a block that may be compiled: what is inside it is then, and the recomputation is not."""
    return torch.compiler.disable(region.__call__, recursive=False)  # type: ignore[no-any-return]


# --- which modules are blocks

_CONTAINERS: Final = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated modules that make up a model's depth, by name and in order.

    These are the children of one class, two or more of them in a ModuleList, ModuleDict or Sequential. What lies
    inside such a child is not looked at, and torch's own elementary modules do not count: a Linear keeps nothing but
    its input. Of several classes, the one that holds nearly all the parameters is meant; ValueError if none does.
    """
    by_class: dict[type[nn.Module], dict[str, nn.Module]] = {}
    for name, child in repeated_blocks(model).items():
        by_class.setdefault(type(child), {})[name] = child
    if not by_class:
        raise ValueError(
            "no blocks to checkpoint were found: the model has no ModuleList, ModuleDict or Sequential in which "
            "modules of one class are repeated; name the blocks, such as 'layers.*'"
        )
    sizes = {
        kind: sum(param.numel() for block in blocks.values() for param in block.parameters())
        for kind, blocks in by_class.items()
    }
    largest = max(sizes, key=sizes.__getitem__)
    candidates = [kind for kind in by_class if kind is largest or 10 * sizes[kind] > sizes[largest]]
    if len(candidates) > 1:
        listed = "\n".join(
            f"  {', '.join(_patterns(by_class[kind]))}: {len(by_class[kind])} x {kind.__name__}, "
            f"{sizes[kind]:,} parameters"
            for kind in candidates
        )
        raise ValueError(f"which blocks to checkpoint? Name those that are meant, of\n{listed}")
    return by_class[largest]


def named_blocks(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The modules with these names, in the model's order; ValueError for a name that fits none, or no computation."""
    modules = {name: module for name, module in model.named_modules() if name}
    wanted: set[str] = set()
    for pattern in patterns:
        fitting = [name for name in modules if fits(name, pattern)]
        if not fitting:
            topmost = f"; the topmost are {[n for n, _ in model.named_children()]}"
            hint = did_you_mean(pattern, modules, otherwise=topmost)
            raise ValueError(f"blocks to checkpoint: the model has no module {pattern!r}{hint}")
        for name in fitting:
            if isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)):
                raise ValueError(
                    f"blocks to checkpoint: {name!r} is a {type(modules[name]).__name__}, which computes nothing "
                    f"itself; write '{name}.*'"
                )
        wanted.update(fitting)
    return {name: module for name, module in modules.items() if name in wanted}


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of one class, two or more in a ModuleList, ModuleDict or Sequential, by name and in order: of several
    classes, if there are. torch's own elementary modules do not count, nor what lies inside a block."""
    return dict(_repeated(model, "", set()))


def _repeated(module: nn.Module, prefix: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    children = {prefix + name: child for name, child in module.named_children() if child not in seen}
    seen.update(children.values())
    counts = Counter(map(type, children.values())) if isinstance(module, _CONTAINERS) else Counter()
    for name, child in children.items():
        is_block = counts[type(child)] > 1 and not _is_elementary(child)
        if is_block and type(child) not in _CONTAINERS:
            yield name, child
            continue
        inside = list(_repeated(child, f"{name}.", seen))
        if inside or not is_block or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from inside
        else:
            yield name, child  # a Sequential that is a block, as it does not hold any


def _is_elementary(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None


def _patterns(names: Any) -> list[str]:
    """`a.0`, `a.1` and `b.0` as `a.*` and `b.*`."""
    return list(dict.fromkeys(".".join([*name.split(".")[:-1], "*"]) for name in names))
