"""What an engine has of a parameter beside the parameter: the fp32 weight that the optimizer steps, its states, and the
gradient between backward and step. `deepspeed.utils.safe_get_full_fp32_param` and its kin, for every ZeRO stage.

"full" is the whole of the parameter (of this tensor-parallel rank's part of it); every rank must take part. "local" is
this rank's shard [n], without communication. A getter returns a copy, and None for a parameter that no engine has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ..comm.comm import Rows
from ..train.base_engine import BaseEngine
from ..zero.shard import ShardedParam
from .start import engine_of


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The weight as the optimizer steps it: in fp32 where the model is in fp16 or bf16."""
    return _seen(param, lambda engine, held: _whole(held, _weight(held)))


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's shard of it."""
    return _seen(param, lambda engine, held: _weight(held).clone())


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Have every rank go on from `value`, of the parameter's shape, the same on all. The model has it at once."""
    engine, held = _known(param)
    mine = _own_part(held, value)
    with engine.states.at_once():
        _write_weight(held, mine)
    if held.resident:
        held.flat.copy_(value.detach().reshape(-1))


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Have this rank's shard be `value` [n]. Every rank must give its own: whole parameters are gathered anew."""
    engine, held = _known(param)
    with engine.states.at_once():
        _same_shape(held, value, _weight(held).shape)
        _write_weight(held, value.detach())
        if held.resident:
            held.flat.copy_(_whole(held, value.detach()).view(-1))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """The optimizer's state of that key, as `exp_avg`. Raises ValueError on all ranks if there is none (yet)."""

    def look(engine: BaseEngine, held: ShardedParam) -> Tensor:
        states = _states(engine, held)
        return _whole(held, states.get(optim_state_key), _without(held, states, optim_state_key))

    return _seen(param, look)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's shard of it. Raises ValueError if there is none (yet)."""
    return _seen(param, lambda engine, held: _there(engine, held, optim_state_key).clone())


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Have the state of that key be `value`, of the parameter's shape. Raises ValueError if there is none (yet)."""
    engine, held = _known(param)
    mine = _own_part(held, value)
    with engine.states.at_once():
        if mine.numel():
            _there(engine, held, optim_state_key).copy_(mine)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Have this rank's shard of the state be `value` [n]. Raises ValueError if there is none (yet)."""
    engine, held = _known(param)
    with engine.states.at_once():
        state = _there(engine, held, optim_state_key)
        _same_shape(held, value, state.shape)
        state.copy_(value.detach())


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The gradient as the step will use it before clipping: the mean over ranks, without loss scale, of the
    micro-batches so far. None before a backward, after the step, for a parameter that no rank used, and where
    gradients are not reduced before the last micro-batch (stages 0 and 1)."""
    found = engine_of(param)
    if found is None:
        return param.grad
    local = safe_get_local_grad(param)
    return None if local is None else _whole(found[1], local)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's shard of it."""
    found = engine_of(param)
    if found is None:
        return None
    engine, held = found
    reduced = engine.zero.reducer.reduced_gradient(held)
    if reduced is None:
        return None
    return reduced.to(held.master_dtype) * (engine.zero.reducer.postscale / engine.scaler.scale)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Have the step use `value`, of the parameter's shape, the same on all ranks. Raises ValueError if there is no
    gradient that it could replace."""
    _, held = _known(param)
    safe_set_local_grad(param, _own_part(held, value))


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Have the step use `value` [n] for this rank's shard."""
    engine, held = _known(param)
    reduced = engine.zero.reducer.reduced_gradient(held)
    if reduced is None:
        raise ValueError(
            f"{held.name} has no gradient to be replaced: call this between engine.backward, of the step's last "
            "micro-batch in ZeRO stages 0 and 1, and engine.step"
        )
    _same_shape(held, value, reduced.shape)
    reduced.copy_(value.detach() * (engine.scaler.scale / engine.zero.reducer.postscale))


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace the gradient of each parameter that has one by `update_func(gradient, parameter)`."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


# --- inside


def _seen(param: nn.Parameter, look: Callable[[BaseEngine, ShardedParam], Tensor]) -> Tensor | None:
    """What `look` finds with masters and states in memory; None for a parameter that no engine has."""
    found = engine_of(param)
    if found is None:
        return None
    engine, held = found
    engine.optimizer_step.take_moved()
    with engine.states.at_once(changed=False):
        return look(engine, held)


def _known(param: nn.Parameter) -> tuple[BaseEngine, ShardedParam]:
    found = engine_of(param)
    if found is None:
        raise ValueError(f"a parameter of shape {tuple(param.shape)} is of no engine's model: call initialize first")
    found[0].optimizer_step.take_moved()
    return found


def _weight(held: ShardedParam) -> Tensor:
    """This rank's shard [n] of what the optimizer steps; of a frozen parameter, of itself."""
    if held.trainable:
        return held.master.data.view(-1)
    shard = torch.empty(held.stop - held.start, dtype=held.param.dtype, device=held.param.device)
    held.read_shard(shard)
    return shard


def _write_weight(held: ShardedParam, shard: Tensor) -> None:
    held.write_shard(shard.to(held.param.device))
    if held.trainable and not held.master_is_shard:
        held.master.data.view(-1).copy_(shard)


def _states(engine: BaseEngine, held: ShardedParam) -> dict[str, Tensor]:
    """Key -> this rank's shard [n] of an optimizer's state, in its own memory."""
    found = {} if engine.optimizer is None or not held.trainable else engine.optimizer.state.get(held.master, {})
    tensors = {key: state for key, state in found.items() if isinstance(state, Tensor)}
    return {key: state.view(-1) for key, state in tensors.items() if state.shape == held.master.shape}


def _there(engine: BaseEngine, held: ShardedParam, key: str) -> Tensor:
    states = _states(engine, held)
    if key not in states:
        raise ValueError(_without(held, states, key))
    return states[key]


def _without(held: ShardedParam, states: Iterable[str], key: str) -> str:
    have = ", ".join(sorted(states)) or "none before its first step"
    return f"{held.name} has no optimizer state {key!r}; it has {have}"


def _whole(held: ShardedParam, shard: Tensor | None, missing: str = "") -> Tensor:
    """The parameter-shaped tensor of which this rank has `shard` [n]. Raises ValueError, saying what is `missing`, on
    all ranks if one has none although its shard has elements."""
    if held.partition.num_shards == 1:
        if shard is None:
            raise ValueError(missing)
        return shard.to(held.param.device, held.master_dtype, copy=True).view(held.shape)
    comm = held.gatherer.comm
    length = held.stop - held.start
    shapes = [(block.count, block.width + 1) for block in held.partition.blocks]
    size = sum(ranks * columns for ranks, columns in shapes)
    rows = Rows(torch.zeros(size, dtype=held.master_dtype, device=held.param.device), shapes)
    mine = rows.of(comm.rank)
    if shard is not None:
        mine[:length] = shard
    mine[-1] = 1 if shard is not None or length == 0 else 0
    comm.all_gather(rows, "parameter").wait()
    if not all(bool(block[:, -1].all()) for block in rows.blocks):
        raise ValueError(missing)
    whole = torch.empty(held.numel, dtype=mine.dtype, device=mine.device)
    held.partition.from_shards([block[:, :-1] for block in rows.blocks], whole)
    return whole.view(held.shape)


def _same_shape(held: ShardedParam, value: Tensor, shape: torch.Size) -> None:
    if value.shape != shape:
        raise ValueError(f"{held.name}: a value of shape {tuple(value.shape)} was given for one of {tuple(shape)}")


def _own_part(held: ShardedParam, value: Tensor) -> Tensor:
    """This rank's shard [n] of a value of the parameter's shape."""
    _same_shape(held, value, held.shape)
    return value.detach().reshape(-1)[held.start : held.stop]
