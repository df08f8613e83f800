"""From a model and a number of ranks to a plan."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dsprof.words import joined

from ..comm.comm import Comm
from ..pipe.module import PipelineModule
from ..tensor.layers import layer_of, layers_of
from .adapt import find_arrangement
from .blocks import Edges, LayerSpan, Stack, with_edges
from .example_inputs import given_inputs, guesses, variants
from .plan import TensorPlan
from .sequence_parallel import NO_BLOCKS, blocks_here, find_stack, whole_in, widest
from .solve import decide
from .stage_tracer import try_stages
from .styles import PlanError, Role, Roles, Wanted, leave_whole, own_plan, own_styles, wanted_styles
from .tracer import Trial, brief, note_randomness, observe, run_again

_log: Final = logging.getLogger(__name__)


def plan_for(
    model: nn.Module,
    size: int,
    *,
    plan: Mapping[str, str] | str | None = None,
    sequence_parallel: bool = False,
    sequence_dim: int = 1,
    example: Any = None,
    everyone: Comm | None = None,
) -> TensorPlan:
    """How `model` is to be sharded over `size` tensor-parallel ranks. It is not changed, and its weights are not read.

    `plan` is None for the model's own plan (`tp_plan` of transformers) where there is one, with what it leaves open
    derived; `"derive"` to derive all of it; or a dict of patterns and styles (styles.py). Whatever it comes from is
    rehearsed. `example` is what the model's forward takes, a tuple or a dict, and of a pipeline what its first layer
    takes: needed where no input can be made up. With `sequence_parallel` activations between the sharded regions of the
    blocks are sharded along `sequence_dim`. The stages of a pipeline are on the ranks of `everyone`, all of which call
    this then; without it, all are taken to be on this rank.

    Raises PlanError, naming the module, for what cannot be derived or carried out.
    """
    if size < 1:
        raise PlanError(f"tensor parallelism over {size} ranks: write 1 or more")
    if size == 1:
        return TensorPlan(1)
    tokens = size if sequence_parallel else 1
    pipeline = model if isinstance(model, PipelineModule) else None
    tried = None if pipeline is None else try_stages(pipeline, tokens, example, everyone)
    blocks: list[int] = []
    span: LayerSpan | None = None
    try:
        wanted = _wanted(model, plan)
        trials = _trials(model, tokens, wanted, example, tried)
        found = decide(model, trials, wanted, size)
        if pipeline is not None and sequence_parallel:
            blocks = blocks_here(pipeline, trials, found.roles)
    finally:  # the other ranks go on to this, too, if this one cannot plan
        if pipeline is not None and sequence_parallel:
            span = widest(blocks, everyone or Comm(None, None), pipeline.placement.bounds[-1])
    if pipeline is not None and sequence_parallel and span is None:
        raise PlanError(NO_BLOCKS)
    trials += _variants(trials)
    shards = any(role.style != "whole" for role in found.roles.values())
    if not shards and "auto" in wanted.values() and pipeline is None:
        reasons = "; ".join(f"{role.module}: {role.why}" for role in list(found.roles.values())[:5])
        raise PlanError(f"tensor parallelism over {size} ranks: found nothing to shard ({reasons or 'no layers'})")
    stack = find_stack(model, found.roles, sequence_dim, span) if sequence_parallel else None
    partial = list(found.partial)
    if stack is not None:
        whole = whole_in(model, stack, found.roles)
        partial += [name for name in whole if name not in partial and name not in found.shares]
        _refuse_batch_norms(model, stack, found)
        for trial in trials:
            _note_end(trial, stack)
    for trial in trials:
        note_randomness(trial)
    arrangement = find_arrangement(model, trials, found, stack, size)
    random = _random_regions(trials, found.roles)
    element_size = next((p.element_size() for p in model.parameters() if p.is_floating_point()), 4)
    return TensorPlan(
        size, tuple(found.roles.values()), arrangement, stack, tuple(partial), random, element_size,
        _others(model, found),
    )  # fmt: skip


def _wanted(model: nn.Module, plan: Mapping[str, str] | str | None) -> dict[str, Wanted]:
    if isinstance(plan, Mapping):
        return wanted_styles(model, plan)
    if plan is None:
        return own_styles(model, own_plan(model))
    if plan != "derive":
        raise PlanError(f'tensor parallel plan: {plan!r} is none; write "derive", or a dict of patterns and styles')
    return own_styles(model, {})


def _trials(
    model: nn.Module, tokens: int, wanted: Mapping[str, Wanted], example: Any, tried: list[Trial] | str | None
) -> list[Trial]:
    """What was `tried` of a pipeline, or trials of the model on `example`, or on what is made up; in the latter
    sequences are a multiple of `tokens`."""
    failed: dict[str, str] = {}
    if tried is not None:
        if not isinstance(tried, str):
            return tried
        if example is not None:
            raise PlanError(f"tensor parallelism: {tried}")
        failed[""] = tried
        trials = _try_children("", model, tokens, failed, alone=False)
        takes = "the first layer of the pipeline takes"
    elif example is not None:
        try:
            return [observe("", model, given_inputs(example))]
        except Exception as error:
            raise PlanError(f"tensor parallelism: the model does not take the example: {brief(error)}") from error
    else:
        trials = _try("", model, tokens, failed)
        takes = "its forward takes"
    seen = {joined(trial.root, name) for trial in trials for name in layers_of(trial.module)}
    for name in wanted:
        if name not in seen and wanted[name] != "whole":
            place = max((root for root in failed if name.startswith(f"{root}.") or not root), key=len, default="")
            raise PlanError(
                f"tensor parallelism: cannot find out how to shard {name}: {place or 'the model'} could not be tried "
                f"on made-up inputs ({failed.get(place, 'it has no forward')}). Pass example= (what {takes}) "
                f"to initialize or plan_for, or {leave_whole(name)}"
            )
    return trials


def _try(name: str, module: nn.Module, tokens: int, failed: dict[str, str], alone: bool = True) -> list[Trial]:
    """Trials of `module`, or of as much of it as runs on its own; a layer only where it stands `alone`.

    Layers called by code that cannot be run are not tried one by one: what they mean to each other would not be seen.
    """
    if not layers_of(module) or (layer_of(module) is not None and not alone):
        return []
    has_forward = type(module).forward is not nn.Module.forward
    for inputs in guesses(module, tokens) if has_forward else ():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of inputs that are not the right ones
                return [observe(name, module, inputs)]
        except Exception as error:
            failed.setdefault(name, brief(error))
    alone = not has_forward or isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    return _try_children(name, module, tokens, failed, alone)


def _try_children(name: str, module: nn.Module, tokens: int, failed: dict[str, str], alone: bool) -> list[Trial]:
    return [
        trial
        for child, inner in module.named_children()
        for trial in _try(joined(name, child), inner, tokens, failed, alone)
    ]


def _variants(trials: Sequence[Trial]) -> list[Trial]:
    found = []
    for trial in trials:
        for inputs in variants(trial.module, trial.inputs):
            try:
                found.append(observe(trial.root, trial.module, inputs))
            except Exception:  # it does not take the mask of this kind, then
                _log.debug("%s could not be tried with a mask", trial.root or "the model", exc_info=True)
    return found


def _refuse_batch_norms(model: nn.Module, stack: Stack, found: Roles) -> None:
    """One between the regions would normalize by this rank's part of the sequence."""
    for name, module in model.named_modules():
        ours = any(share.startswith(f"{name}.") for share in found.shares)
        if isinstance(module, _BatchNorm) and stack.holds(name) and not ours:
            raise PlanError(
                f"sequence_parallel: {name} is a batch norm between {stack.first} and {stack.last}, where a rank has "
                "a part of the sequence and would normalize by that alone; switch it off"
            )


def _others(model: nn.Module, found: Roles) -> tuple[tuple[str, str], ...]:
    """Modules, and their classes, that hold matrices and are neither sharded nor listed: convolutions, experts."""
    listed = {name for role in found.roles.values() for name in (role.module, f"{role.module}.out_proj".lstrip("."))}
    return tuple(
        (name, type(module).__name__) for name, module in model.named_modules()
        if name not in listed and any(
            param is not None and param.dim() > 1 and joined(name, key) not in found.shares
            for key, param in module._parameters.items()
        )
    )  # fmt: skip


class _Noted(Edges):
    """Keeps what the blocks return."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial

    def join(self, x: Tensor) -> Tensor:
        self._trial.joined = x.detach()
        return x


def _note_end(trial: Trial, stack: Stack) -> None:
    """Keep what the blocks of `stack` return, if they are among what was tried; they must all be, or none."""
    used = [block for block in (stack.first, stack.last) if any(c.module.startswith(f"{block}.") for c in trial.calls)]
    if stack.span is not None or len(used) == 2:
        with with_edges(trial, stack, _Noted(trial)):
            run_again(trial)
    elif used and stack.first != stack.last:
        raise PlanError(
            f"sequence_parallel: the blocks from {stack.first} to {stack.last} could not be tried one after the other; "
            "pass example= (what the model's forward takes), or switch it off"
        )


def _random_regions(trials: Sequence[Trial], roles: Mapping[str, Role]) -> tuple[int, ...]:
    """Regions in which random numbers are drawn in training."""
    found = set()
    for trial in trials:
        if not trial.trains:  # then we do not know
            found |= {role.region for role in roles.values() if role.region is not None}
        before: dict[int, int] = {}
        for call in trial.calls:
            role = roles[call.module]
            if role.region is not None and role.style == "column":
                before.setdefault(role.region, call.drawn)
            elif role.region is not None and before.pop(role.region, call.drawn) != call.drawn:
                found.add(role.region)
    return tuple(sorted(found))
