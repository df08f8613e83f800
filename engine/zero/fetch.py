"""Stage 3: parameters come before a module needs them and go when it is done.

The first pass through the model records which modules need parameters, in forward and backward, with recomputation.
Later passes read that sequence ahead to prefetch, and to keep what is needed again soon. Nothing depends on the
sequence being right: a pass that goes another way fetches when it needs to, and is recorded anew.

Who needs what is seen in three ways. Modules announce themselves, by hooks on their calls and on the gradients of their
outputs. Reading a parameter by its name (`self.head.weight`) fetches it for the module that runs, and from then on it
is fetched with that module. What autograd kept of a parameter is fetched when backward unpacks it, however it comes
there: by a second backward, past an operation in place, through a loss that no module returned.

A parameter that is used through a reference that a module took earlier is fetched by its stand-in (`placeholder`), and
one that is used while no module runs is an error. `zero.GatheredParameters` makes it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from ..config import ZeroConfig
from ..hooks import FETCH, Hooks
from .fetch_order import CurrentPass, ModuleParams, Pass
from .gather import Gatherer
from .param_hooks import Functions, SavedParams, WatchedParameters, in_backward, is_torchs, once_a_backward, tensors_in
from .shard import ShardedParam
from .storage import LiveParams
from .validate import UNCOMPILED, is_compiled


@dataclass(eq=False, slots=True)
class _ModuleCall:
    """A module's forward under way."""

    owner: ModuleParams
    using: list[ShardedParam] = field(default_factory=list)
    """What is whole for it, each counted as one user."""
    saved_hooks: saved_tensors_hooks | None = None
    """For as long as the call takes, unless there is one around it."""
    starts_pass: bool = False
    with_grad: bool = True
    interrupted: CurrentPass | None = None
    """The pass that goes on when this call, without gradients, is over."""


class Fetcher(SavedParams):
    """Fetches, prefetches and releases the parameters of a module tree."""

    def __init__(
        self,
        root: nn.Module,
        sharded: Mapping[nn.Parameter, ShardedParam],
        gatherer: Gatherer,
        settings: ZeroConfig,
        hooks: Hooks,
    ) -> None:
        super().__init__()
        self.settings = settings
        self._params = sharded
        self._gatherer = gatherer
        self._hooks = hooks
        self._on_disk = any(param.store is not None for param in sharded.values())
        self._handles: list[RemovableHandle] = []
        self._replaced: list[tuple[nn.Module, dict[str, nn.Parameter | None]]] = []
        self._calls: list[_ModuleCall] = []
        self._records = {True: Pass(()), False: Pass(())}
        """The recorded ways: with gradients, and without."""
        self._pass: CurrentPass | None = None
        self.live_params: LiveParams[ShardedParam] = LiveParams()
        self._owners: dict[ShardedParam, list[ModuleParams]] = {}
        """Those that each is fetched for."""
        self._hooked: list[tuple[nn.Module, ModuleParams]] = []
        self.functions = Functions()
        self._install(root)
        if not self.functions.are_torchs:
            self._distrust(owner for _, owner in self._hooked)
        self._sharded = [param for param in sharded.values() if not param.persistent]
        for param in self._sharded:
            param.live_params = self.live_params
            param.fetcher = self
            param.release()
            self.by_storage[param.storage.key] = param

    def remove(self) -> None:
        """Take every hook out of the model."""
        for handle in self._handles:
            handle.remove()
        for module, params in self._replaced:
            module._parameters = params

    def finish_backward(self) -> None:
        """Backward is over: nothing is needed until the next forward, and a prefetch would be of old weights."""
        if self._pass is not None:
            self._records[self._pass.with_grad] = self._pass.outcome()
        self._release_all()

    def weights_change(self) -> None:
        """A step or a load is about to change the weights: what is whole now, for a forward that no backward has
        followed, must not be taken for the new ones."""
        self.weights_written()
        if self.live_params.live:
            self._release_all()

    def weights_written(self) -> None:
        super().weights_written()
        if self._gatherer.agreement is not None:
            self._gatherer.agreement.lapse()

    def gradient_taken(self, param: ShardedParam) -> None:
        """The gradient of `param` is complete: in backward, its last use. If it was not, unpacking fetches it again."""
        param.users = 0
        self._release(param)

    def _begin_pass(self, call: _ModuleCall) -> None:
        if not call.with_grad:
            call.interrupted = self._pass
        for param in [param for param in self.live_params if param.moved]:
            self._release(param)  # by a `module.to` that the first sharded one has ended
        self._pass = CurrentPass(self._records[call.with_grad], call.with_grad)
        self._gatherer.begin_pass()

    def _end_pass_without_grad(self, call: _ModuleCall) -> None:
        if self._pass is not None:
            self._records[False] = self._pass.outcome()
        self._gatherer.drain()
        for param in list(self.live_params):
            if not param.users:
                self._release(param)
        self._pass = call.interrupted

    # --- hooks on modules

    def _install(self, root: nn.Module) -> None:
        """Every module is hooked that has sharded parameters, or has children that do: it may use theirs."""
        for name, module in root.named_modules():
            if any(self.sharded(param) is not None for param in module._parameters.values()):
                self._replaced.append((module, module._parameters))
                module._parameters = WatchedParameters(module._parameters, self._read)
            if module is not root and not any(self.sharded(param) is not None for param in module.parameters()):
                continue
            own = [self._params[p] for p in dict.values(module._parameters) if self.sharded(p) is not None]
            owner = ModuleParams(name, own, backward=ModuleParams(name, []) if is_torchs(module) else None)
            owner.choose_for_backward()
            self._hooked.append((module, owner))
            for param in own:
                self._owners.setdefault(param, []).append(owner)
            self._handles += [
                module.register_forward_pre_hook(self._before_forward(owner, module, root), prepend=True),
                module.register_forward_hook(self._after_forward(owner), with_kwargs=True, always_call=True),
            ]

    def _before_forward(
        self, owner: ModuleParams, module: nn.Module, root: nn.Module
    ) -> Callable[[nn.Module, Any], None]:
        kind, is_root = type(module), module is root
        forward = kind.forward

        def hook(module: nn.Module, args: Any) -> None:
            if not self._calls:
                self._look_at_code()
            if owner.backward is not None and (
                type(module) is not kind or kind.forward is not forward or "forward" in module.__dict__
            ):
                self._distrust([owner])
            call = _ModuleCall(owner, with_grad=torch.is_grad_enabled())
            self._calls.append(call)
            call.saved_hooks = self.hook_saved_tensors()
            if call.saved_hooks is not None:
                call.saved_hooks.__enter__()
            if is_root and not in_backward() and not any(other.starts_pass for other in self._calls):
                call.starts_pass = True
                self._begin_pass(call)
            with self._hooks.span("module", FETCH):
                call.using = self._need(owner)

        return hook

    def _look_at_code(self) -> None:
        """Before a forward: what the script has replaced since. Raises RuntimeError for what it has compiled."""
        if self.functions.were_replaced():
            self._distrust(owner for _, owner in self._hooked)
        for module, owner in self._hooked:
            if is_compiled(module):
                raise RuntimeError(f"forward: {owner.name or 'the model'} is compiled, and {UNCOMPILED}")

    def _distrust(self, owners: Iterable[ModuleParams]) -> None:
        """They run code of the script's own since the engine was made (a parametrization, another `F.linear`), which
        may keep parameters for backward itself: have all of them there."""
        for owner in owners:
            owner.backward = None

    def _after_forward(self, owner: ModuleParams) -> Callable[[nn.Module, Any, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not self._calls or self._calls[-1].owner is not owner:
                return  # it failed before our hook ran
            call = self._calls.pop()
            with self._hooks.span("module", FETCH):
                if call.saved_hooks is not None:
                    call.saved_hooks.__exit__()
                if torch.is_grad_enabled() and owner.params:
                    self._watch_outputs(owner, output)
                    self._watch_inputs(owner, (args, kwargs))
                if not in_backward():  # what a recomputed forward brought, backward needs next
                    self._done(call)
                if call.starts_pass and not call.with_grad:
                    self._end_pass_without_grad(call)

        return hook

    def _watch_outputs(self, owner: ModuleParams, output: Any) -> None:
        """Fetch for the module's backward when the first gradient of an output arrives."""
        needed = owner.backward or owner
        if needed.params:
            once_a_backward(tensors_in(output), self._need_again, needed)

    def _watch_inputs(self, owner: ModuleParams, inputs: Any) -> None:
        """Release frozen parameters when a gradient of the module's inputs is there: nothing else marks their end."""
        frozen = [param for param in owner.params if not param.trainable]
        if not frozen:
            return
        differentiable = False

        def after_backward(frozen: list[ShardedParam]) -> None:
            nonlocal differentiable
            # By create_graph. What a backward through that one needs of them, nothing announces.
            differentiable = differentiable or torch.is_grad_enabled()
            for param in () if differentiable else frozen:
                self.gradient_taken(param)

        once_a_backward([tensor for tensor in tensors_in(inputs) if not tensor.is_leaf], after_backward, frozen)

    def sharded(self, param: nn.Parameter | None) -> ShardedParam | None:
        """`param` as it is divided; None if it is always whole."""
        found = None if param is None else self._params.get(param)
        return None if found is None or found.persistent else found

    def _first_saved(self, param: ShardedParam) -> None:
        """Autograd saves `param`: from now on it is fetched for the backward of the modules that it is fetched for."""
        param.saved = True
        for owner in self._owners[param]:
            owner.choose_for_backward()

    def _read(self, param: nn.Parameter | None, by_name: bool) -> None:
        """A module's parameter was read. To list them is no sign that the module uses them each time."""
        sharded = self.sharded(param)
        if sharded is not None:
            self.fetch_used(sharded, remember=by_name)

    def fetch_used(self, param: ShardedParam, *, remember: bool = True) -> None:
        """A parameter is used while a module runs that it does not belong to, or whose turn it is not.

        With `remember` it is fetched with that module from now on.
        """
        if param.users or not (self._calls or in_backward()):
            return
        param.users = 1
        name = ""
        if self._calls:
            call = self._calls[-1]
            call.using.append(param)
            name = call.owner.name
            if remember and param not in call.owner.params:
                call.owner.params.append(param)
                call.owner.choose_for_backward()
                self._owners[param].append(call.owner)
        self._fetch([param], name)

    # --- fetching

    def _need(self, owner: ModuleParams) -> list[ShardedParam]:
        """Have `owner`'s parameters whole, and start on those that are needed next."""
        if self._pass is not None and (in_backward() or any(call.starts_pass for call in self._calls)):
            self._pass.step(owner)  # else a part of the model was called by itself
        using = list(owner.params)
        for param in using:
            param.users += 1
        self._fetch(using, owner.name)
        return using

    def _need_again(self, owner: ModuleParams) -> None:
        """In backward."""
        with self._hooks.span("module", FETCH):
            self._need(owner)

    def _fetch(self, needed: list[ShardedParam], module: str) -> None:
        missing = [param for param in needed if param not in self.live_params]
        self._make_room(sum(param.numel for param in missing))
        self._start(missing, module)
        awaited = [param for param in needed if not param.resident]
        self._prefetch(sum(param.numel for param in awaited))
        self._gatherer.finish(awaited)

    def _start(self, params: list[ShardedParam], module: str) -> None:
        for param in params:
            self.live_params.expect(param)
        if params:
            self._gatherer.start(params, module)

    def _prefetch(self, awaited: int) -> None:
        """Start gathering what comes next in the recorded sequence, up to the bucket and the limit of live elements.

        Of what is on its way, `awaited` elements are not ahead, but needed now.
        """
        if self._pass is None:
            return
        batch: list[ShardedParam] = []
        size = 0
        for param in self._pass.upcoming():
            if param in self.live_params or param in batch:
                continue
            if self.live_params.coming - awaited + size + param.numel > self.settings.stage3_prefetch_bucket_size:
                break
            if self.live_params.live + size + param.numel > self.settings.stage3_max_live_parameters:
                break
            batch.append(param)
            size += param.numel
        self._start(batch, batch[0].name.rpartition(".")[0] if batch else "")
        if self._on_disk:
            self._gatherer.expect(self._pass.ahead())

    def _done(self, call: _ModuleCall) -> None:
        """A module's forward is over: release what is not needed again soon."""
        for param in call.using:
            param.users = max(0, param.users - 1)
            if param.users or not param.resident:
                continue
            if self._pass is None or not self._pass.needed_within(param, self.settings.stage3_max_reuse_distance):
                self._release(param)

    def _make_room(self, size: int) -> None:
        """Release what was kept for later until `size` more elements fit; those in use stay.

        First what came first: of what forward keeps for backward that is needed last.
        """
        excess = self.live_params.live + size - self.settings.stage3_max_live_parameters
        for param in list(self.live_params) if excess > 0 else ():
            if excess > 0 and not param.users:
                self._release(param)
                excess -= param.numel

    def _release_all(self) -> None:
        """No pass is under way, and nothing is in use."""
        self._pass = None
        self._gatherer.drain()
        for param in self._sharded:
            param.users = 0
            self._release(param)

    def _release(self, param: ShardedParam) -> None:
        if param.persistent or not param.resident:
            return
        param.release()
        if self._pass is not None:
            self._pass.released(param)
        self._hooks.mark("release", module=param.name, purpose="parameter", value=float(self.live_params.live))
