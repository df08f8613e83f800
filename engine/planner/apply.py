"""From a plan to the sharded model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from ..comm.comm import Comm
from ..comm.consensus import gather_objects
from ..tensor import layers
from ..tensor.attention import HeadsAttention
from ..tensor.layers import Features, is_batch_norm, shard_batch_norm
from ..tensor.rng import RankStream
from ..tensor.shape_override import override_shapes
from ..tensor.sharding import TensorShard, even_shard, mark_partial, shard_in_place
from .dependence import Share
from .derive import plan_for
from .plan import TensorPlan
from .sequence_parallel import shard_sequence
from .styles import PlanError, Role


class ElsewhereError(PlanError):
    """Another rank could not plan, and said why."""


def parallelize(
    model: nn.Module,
    comm: Comm,
    plan: TensorPlan | Mapping[str, str] | str | None = None,
    *,
    sequence_parallel: bool = False,
    sequence_dim: int = 1,
    example: Any = None,
    everyone: Comm | None = None,
) -> TensorPlan:
    """Shard `model` in place for the ranks of `comm`, all of which call this with a model of the same shapes.

    `plan` is one of `plan_for`'s, or what that takes. Parameters stay the same objects, with this rank's part in them;
    how each is sharded is `shard_of(param)`. Do this before the forwards of blocks are wrapped (recomputation), and
    before an optimizer has states.

    If any rank cannot, PlanError is raised on all of them, and on those of `everyone`, which may have other models:
    other stages of a pipeline.
    """
    made: TensorPlan | None = None
    cause: PlanError | None = None
    try:
        if isinstance(plan, TensorPlan):
            made = plan
            _check_given(model, plan, comm.size)
        else:
            made = plan_for(
                model, comm.size, plan=plan, sequence_parallel=sequence_parallel, sequence_dim=sequence_dim,
                example=example, everyone=everyone,
            )  # fmt: skip
    except PlanError as error:
        cause = error
    cause = _agreed(comm, None if cause is not None else str(made), cause, "tensor-parallel rank")
    if everyone is not None:
        cause = _agreed(everyone, None if cause is not None else "", cause, "rank")
    if cause is not None:
        raise cause
    assert made is not None
    if made.size > 1:
        _apply(model, made, comm)
    return made


def _check_given(model: nn.Module, plan: TensorPlan, size: int) -> None:
    if plan.size != size:
        raise PlanError(f"the tensor parallel plan is one for {plan.size} ranks, and there are {size}")
    modules = dict(model.named_modules())
    for role in plan.roles:
        found = layers.layer_of(modules[role.module]) if role.module in modules else None
        if found != role.layer:
            raise PlanError(f"the tensor parallel plan was made for another model: {role.module} is {found} here")


def _agreed(comm: Comm, planned: str | None, cause: PlanError | None, rank: str) -> PlanError | None:
    """What all ranks of `comm` are to raise: `cause`, or why another one failed, or that the plans differ."""
    if comm.size == 1:
        return cause
    digest = None if planned is None else hashlib.blake2b(planned.encode(), digest_size=8).hexdigest()
    own = None if cause is None or isinstance(cause, ElsewhereError) else str(cause)
    said = gather_objects((digest, own), comm)
    if cause is not None:
        return cause
    for other, (_, why) in enumerate(said):
        if why is not None:
            return ElsewhereError(f"{rank} {other} could not plan: {why}")
    differs = [other for other, answer in enumerate(said) if answer != said[0]]
    if differs:
        return PlanError(f"{rank}s {differs} planned otherwise than rank 0: the model must be the same on all")
    return None


# --- sharding


def _apply(model: nn.Module, plan: TensorPlan, comm: Comm) -> None:
    params = dict(model.named_parameters(remove_duplicate=False))
    entrances: dict[str, layers.Entrance] = {}
    streams = {region: RankStream(comm.rank) for region in plan.random_regions}
    readers = [role.shares for role in plan.roles]
    for role in plan.roles:
        module = model.get_submodule(role.module)
        along, stream = None, streams.get(role.region) if role.region is not None else None
        if role.style == "heads":
            stream = RankStream(comm.rank)
        if plan.stack is not None and plan.stack.holds(role.module):
            along, stream = plan.stack.dim, None  # in the blocks each rank draws for itself all the time
        if role.style in ("column", "column_gather"):
            key = role.shares or role.module
            if key not in entrances:
                entrances[key] = layers.Entrance(comm, max(1, readers.count(key)), sequence_dim=along, stream=stream)
            _shard_column(module, role, comm, entrances[key])
        elif role.style in ("row", "row_split"):
            _shard_row(module, role, layers.Row(comm, role.module, along, stream, role.style == "row_split"))
        elif role.style == "vocab":
            shard_vocabulary(module, role, comm)
        elif role.style == "heads":
            _shard_attention(module, role, layers.Exit(comm, role.module, along, stream))
    for change in plan.arrangement.changes:
        change.make(model.get_submodule(change.module))
    for name, override in plan.arrangement.overrides:
        override_shapes(model.get_submodule(name), override)
    for name, share in plan.arrangement.shares:
        _shard_share(model, name, share, comm)
    for name in plan.partial:
        mark_partial(params[name])
    if plan.stack is not None:
        shard_sequence(model, plan.stack, comm)


def _shard_column(module: nn.Module, role: Role, comm: Comm, entrance: layers.Entrance) -> None:
    shard, bias = _weight_shard(role, role.layer.shape, role.layer.output_dim, comm), module._parameters.get("bias")
    if bias is not None:
        shard_in_place(bias, _weight_shard(role, (role.layer.outputs,), 0, comm))
    state = layers.Column(comm, role.module, entrance, shard, role.style == "column_gather")
    _shard_layer(
        module, role, shard, state, layers.ColumnConv1D if role.layer.kind == "conv1d" else layers.ColumnLinear
    )


def _shard_row(module: nn.Module, role: Role, state: layers.Row) -> None:
    shard = even_shard(role.layer.shape, 1 - role.layer.output_dim, state.comm.size, state.comm.rank)
    _shard_layer(module, role, shard, state, layers.RowConv1D if role.layer.kind == "conv1d" else layers.RowLinear)


def shard_vocabulary(module: nn.Module, role: Role, comm: Comm) -> None:
    """Leave in an embedding this rank's band of the rows."""
    assert isinstance(module, nn.Embedding)
    shard = even_shard(role.layer.shape, 0, comm.size, comm.rank)
    state = layers.Vocabulary(comm, role.module, shard, module.padding_idx)
    _shard_layer(module, role, shard, state, layers.VocabularyEmbedding)


_COUNTS: Final = {
    ("linear", 0): "out_features", ("linear", 1): "in_features", ("conv1d", 0): "nx", ("conv1d", 1): "nf",
    ("embedding", 0): "num_embeddings",
}  # fmt: skip
"""Kind of a layer, and dimension of its weight -> the attribute that says its size."""


def _shard_layer(module: nn.Module, role: Role, shard: TensorShard, state: Any, base: type[nn.Module]) -> None:
    """Leave in a layer this rank's shard of the weight, have it say its size, and compute as `base`."""
    weight = module._parameters["weight"]
    assert weight is not None
    shard_in_place(weight, shard)
    layers.derive(module, base)
    module.tensor = state
    count = _COUNTS[role.layer.kind, shard.dim]
    if hasattr(module, count):
        setattr(module, count, shard.local_shape[shard.dim])


def _shard_attention(module: nn.Module, role: Role, state: Any) -> None:
    assert isinstance(module, nn.MultiheadAttention)
    size, rank, width = state.comm.size, state.comm.rank, role.layer.outputs
    for param in (module.in_proj_weight, module.in_proj_bias):
        if param is not None:
            shape = tuple(param.shape)
            shard_in_place(param, TensorShard(shape=shape, dim=0, bands=(width,) * 3, size=size, rank=rank))
    for param in (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight):
        if param is not None:
            shard_in_place(param, even_shard(param.shape, 0, size, rank))
    shard_in_place(module.out_proj.weight, even_shard((width, width), 1, size, rank))
    layers.derive(module, HeadsAttention)
    module.tensor = state


def _shard_share(model: nn.Module, name: str, share: Share, comm: Comm) -> None:
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    whole = getattr(module, attribute)
    shard = share.bands.shard(whole.shape, share.dim, comm.size, comm.rank)
    if isinstance(whole, nn.Parameter):
        shard_in_place(whole, shard)
    elif is_batch_norm(module):
        shard_batch_norm(module, Features(comm, owner, shard))
    elif tuple(whole.shape) == shard.shape:  # and not another name of one that is sharded
        setattr(module, attribute, shard.take(whole))


def _weight_shard(role: Role, shape: tuple[int, ...], dim: int, comm: Comm) -> TensorShard:
    if role.bands is None:
        return even_shard(shape, dim, comm.size, comm.rank)
    return role.bands.shard(shape, dim, comm.size, comm.rank)
