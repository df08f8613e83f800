"""Stage 3: parameters come before a module needs them and go when it is done.

The first pass through the model records which modules need parameters, in forward and backward, with recomputation.
Later passes read that sequence ahead to prefetch, and to keep what is needed again soon. Nothing depends on the
sequence being right: a pass that goes another way fetches when it needs to, and is recorded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from ..hooks import Hooks
from .gather import Gatherer
from .shard import ShardedParam


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """Sizes in elements, as in DeepSpeed's configuration."""

    prefetch_bucket_size: int
    max_live_parameters: int
    max_reuse_distance: int


@dataclass(eq=False, slots=True)
class _Owner:
    """A module whose parameters are fetched for it: its own, and others' that it was seen to use."""

    name: str
    params: list[ShardedParam]


@dataclass(slots=True)
class _Pass:
    """One way through the model: who needed parameters, in order."""

    uses: list[_Owner] = field(default_factory=list)
    complete: bool = False


class Fetcher:
    """Fetches, prefetches and releases the parameters of a module tree."""

    def __init__(
        self,
        root: nn.Module,
        sharded: Mapping[nn.Parameter, ShardedParam],
        gatherer: Gatherer,
        settings: FetchSettings,
        hooks: Hooks,
    ) -> None:
        self.settings = settings
        self._sharded = sharded
        self._gatherer = gatherer
        self._hooks = hooks
        self._on_disk = any(param.home is not None for param in sharded.values())
        self._handles: list[RemovableHandle] = []
        self._replaced: list[tuple[nn.Module, dict[str, nn.Parameter | None]]] = []
        self._stack: list[_Owner] = []
        self._held: list[ShardedParam] = []
        """In use until backward is over: nothing tells when they are no longer."""
        self._root_active = 0
        self._in_backward = False
        self._passes = {True: _Pass(), False: _Pass()}
        """The recorded ways: with gradients, and without."""
        self._pass = self._passes[True]
        self._place = 0
        self._follows = False
        self._recording: list[_Owner] = []
        self.live = 0
        """Elements of sharded parameters that are whole at this moment, or on their way."""
        self.peak_live = 0
        self._install(root)
        for param in sharded.values():
            param.release()

    def remove(self) -> None:
        """Take every hook out of the model."""
        for handle in self._handles:
            handle.remove()
        for module, params in self._replaced:
            module._parameters = params

    # --- a pass

    def finish_backward(self) -> None:
        """Backward is over: nothing is needed until the next forward, and a prefetch would be of old weights."""
        self._end_pass()
        self._in_backward = False
        stale = self._gatherer.pending
        self._gatherer.finish(stale)
        self._held.clear()
        for param in self._sharded.values():
            param.users = 0
            if param.resident:
                self._release(param)

    def gradient_taken(self, param: ShardedParam) -> None:
        """The gradient of `param` is complete: in backward, its last use."""
        param.users = 0
        if param.resident and param not in self._held:
            self._release(param)

    def _begin_pass(self) -> None:
        grad = torch.is_grad_enabled()
        self._pass = self._passes[grad]
        self._place = 0
        self._follows = self._pass.complete
        self._recording = []

    def _end_pass(self) -> None:
        if self._recording and not (self._follows and self._place == len(self._pass.uses)):
            self._pass.uses = self._recording
            self._pass.complete = True
        self._follows = False
        self._recording = []

    # --- hooks on modules

    def _install(self, root: nn.Module) -> None:
        for name, module in root.named_modules():
            own = [self._sharded[p] for p in module._parameters.values() if p is not None and p in self._sharded]
            own = [param for param in own if not param.persistent]
            if own:
                self._replaced.append((module, module._parameters))
                module._parameters = _Watched(module._parameters, self)
            if not own and module is not root:
                continue
            owner = _Owner(name, own)
            self._handles += [
                module.register_forward_pre_hook(self._before_forward(owner, module is root), prepend=True),
                module.register_forward_hook(self._after_forward(owner, module is root), always_call=True),
            ]

    def _before_forward(self, owner: _Owner, is_root: bool) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            if is_root and not self._in_backward:
                self._root_active += 1
                if self._root_active == 1:
                    self._begin_pass()
            self._stack.append(owner)
            self._need(owner)

        return hook

    def _after_forward(self, owner: _Owner, is_root: bool) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._stack and self._stack[-1] is owner:
                self._stack.pop()
            if torch.is_grad_enabled() and owner.params:
                self._watch_outputs(owner, output)
                self._watch_inputs(owner, args)
            if not self._in_backward:  # what a recomputed forward brought, backward needs next
                self._done(owner)
            if is_root and not self._in_backward:
                self._root_active -= 1
                if self._root_active == 0 and not torch.is_grad_enabled():
                    self._end_pass()
                    self._release_unused()

        return hook

    def _watch_outputs(self, owner: _Owner, output: Any) -> None:
        """Fetch for the module's backward when the first gradient of an output arrives."""
        tensors = [leaf for leaf in _tensors(output) if leaf.requires_grad]
        if not tensors:
            if not self._in_backward:
                self._hold(owner.params)  # backward may come through what we cannot see
            return
        begun = False

        def before_backward(grad: Tensor) -> None:
            nonlocal begun
            if not begun:
                begun = True
                self._in_backward = True
                self._need(owner)

        for tensor in tensors:
            tensor.register_hook(before_backward)

    def _watch_inputs(self, owner: _Owner, args: Any) -> None:
        """Release frozen parameters when the gradient of the module's input is there: nothing else marks their end."""
        frozen = [param for param in owner.params if not param.trainable]
        if not frozen:
            return

        def after_backward(grad: Tensor) -> None:
            for param in frozen:
                self.gradient_taken(param)

        for tensor in _tensors(args):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(after_backward)
                return

    def used_elsewhere(self, param: ShardedParam) -> None:
        """A parameter was read while a module ran that it does not belong to, or whose turn it is not."""
        if not self._stack or param.resident:
            return
        owner = self._stack[-1]
        if param not in owner.params:
            owner.params = [*owner.params, param]
        self._fetch([param], owner.name)
        param.users += 1

    # --- fetching

    def _need(self, owner: _Owner) -> None:
        """Have `owner`'s parameters whole, and start on those that are needed next."""
        self._follow(owner)
        for param in owner.params:
            param.users += 1
        self._fetch([param for param in owner.params if not param.resident], owner.name)

    def _fetch(self, needed: list[ShardedParam], module: str) -> None:
        missing = [param for param in needed if not self._gatherer.under_way(param)]
        self._make_room(sum(param.numel for param in missing))
        if missing:
            self._count(missing)
            self._gatherer.start(missing, module)
        self._prefetch()
        self._gatherer.finish(needed)

    def _prefetch(self) -> None:
        """Start gathering what comes next in the recorded sequence, up to the bucket and the limit of live elements."""
        if not self._follows:
            return
        ahead = 0
        batch: list[ShardedParam] = []
        for place in range(self._place, len(self._pass.uses)):
            for param in self._pass.uses[place].params:
                if param.resident or param in batch:
                    continue
                ahead += param.numel
                if ahead > self.settings.prefetch_bucket_size:
                    break
                if self._gatherer.under_way(param):
                    continue
                if self.live + sum(p.numel for p in batch) + param.numel > self.settings.max_live_parameters:
                    ahead = self.settings.prefetch_bucket_size + 1
                    break
                batch.append(param)
            if ahead > self.settings.prefetch_bucket_size:
                break
        if batch:
            self._count(batch)
            self._gatherer.start(batch, self._pass.uses[self._place].name)
        if self._on_disk:
            self._gatherer.expect(param for owner in self._pass.uses[self._place :] for param in owner.params)

    def _follow(self, owner: _Owner) -> None:
        """Move on in the recorded sequence; give it up for this pass if the pass goes another way."""
        if not (self._root_active or self._in_backward):
            return  # a part of the model called by itself
        self._recording.append(owner)
        if self._follows:
            self._follows = self._place < len(self._pass.uses) and self._pass.uses[self._place] is owner
            self._place += 1

    def _done(self, owner: _Owner) -> None:
        """A module's forward is over: release what is not needed again soon."""
        for param in owner.params:
            param.users = max(0, param.users - 1)
            if param.resident and not param.users and not self._needed_soon(param):
                self._release(param)

    def _needed_soon(self, param: ShardedParam) -> bool:
        """Whether the next use is at most `max_reuse_distance` elements of other parameters away."""
        if not self._follows:
            return False
        distance = 0
        for place in range(self._place, len(self._pass.uses)):
            owner = self._pass.uses[place]
            if param in owner.params:
                return True
            distance += sum(other.numel for other in owner.params)
            if distance > self.settings.max_reuse_distance:
                return False
        return False

    def _make_room(self, size: int) -> None:
        """Release what was kept for later until `size` more elements fit; those in use stay."""
        if self.live + size <= self.settings.max_live_parameters:
            return
        kept = [p for p in self._sharded.values() if p.resident and not p.persistent and not p.users]
        for param in reversed(kept):
            if self.live + size <= self.settings.max_live_parameters:
                return
            self._release(param)

    def _hold(self, params: Iterable[ShardedParam]) -> None:
        for param in params:
            param.users += 1
            self._held.append(param)

    def _count(self, params: Iterable[ShardedParam]) -> None:
        self.live += sum(param.numel for param in params)
        self.peak_live = max(self.peak_live, self.live)

    def _release(self, param: ShardedParam) -> None:
        if param.persistent:
            return
        param.release()
        self.live -= param.numel
        self._hooks.mark("release", module=param.name, purpose="parameter", value=float(self.live))

    def _release_unused(self) -> None:
        self._gatherer.finish(self._gatherer.pending)
        for param in self._sharded.values():
            if param.resident and not param.users:
                self._release(param)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a module's output or arguments, however nested; those of a plain object's attributes too."""
    found = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (nn.Module, type)):
            found += [inner for inner in pytree.tree_leaves(vars(leaf)) if isinstance(inner, Tensor)]
    return found


class _Watched(dict[str, "nn.Parameter | None"]):
    """A module's parameters. Reading one while another module runs (tied weights, `self.head.weight`) fetches it."""

    def __init__(self, params: Mapping[str, nn.Parameter | None], fetcher: Fetcher) -> None:
        super().__init__(params)
        self._fetcher = fetcher

    def __reduce__(self) -> tuple[type[dict[str, nn.Parameter | None]], tuple[dict[str, nn.Parameter | None]]]:
        return dict, (dict(super().items()),)  # a copied or saved module has plain parameters

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        self._look(param)
        return param

    def items(self) -> Any:
        for param in super().values():
            self._look(param)
        return super().items()

    def values(self) -> Any:
        for param in super().values():
            self._look(param)
        return super().values()

    def _look(self, param: nn.Parameter | None) -> None:
        if param is not None and self._fetcher._stack:
            sharded = self._fetcher._sharded.get(param)
            if sharded is not None and not sharded.resident:
                self._fetcher.used_elsewhere(sharded)
