"""A model whose sequences are divided, held against the same one that has them whole, on a few positions.

What the engine does not see is found so, whatever it is: attention that is no `F.scaled_dot_product_attention`,
positions that are counted from 0 on every rank, convolutions along the sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.comm import Comm
from ..tree import each_tensor, leaves
from .layout import Layout, divide
from .parallel import SequenceParallel, has_positions

POSITIONS: Final = 4
"""Of each rank, at most."""
TOLERANCE: Final = {torch.float64: 1e-8, torch.float32: 1e-3}
"""How much of a result may differ, by its norm; half precision has the next."""
IN_HALF: Final = 2e-2


def hold_against_whole(shared: SequenceParallel, model: nn.Module, args: Any, kwargs: Any) -> None:
    """Raise ValueError on all ranks unless `model(*args, **kwargs)` computes the same with divided sequences as with
    whole ones. The arguments are this rank's part; a few of their positions are used. In evaluation, without
    gradients."""
    assert shared.layout is not None
    comm, layout, dim = shared.comm, shared.layout, shared.dim
    few = min(POSITIONS, *layout.lengths)
    small = divide(few * comm.size, comm.size)
    mine = layout.positions(comm.rank)

    seen: list[bool] = []
    each_tensor((args, kwargs), lambda tensor: _note(seen, tensor, has_positions(tensor, dim, len(mine))))
    # What has as many elements on one rank by chance has not on all.
    divided = torch.tensor([*seen, True], dtype=torch.int32, device=comm.device)
    comm.all_reduce(divided, "context-parallel", dist.ReduceOp.MIN).wait()

    def cut(tensor: Tensor) -> Tensor:
        last = tensor.dim() - 1 == dim
        if last and tensor.dtype == torch.int64 and bool((tensor == mine.to(tensor.device)).all()):  # its positions
            return (
                small.positions(comm.rank, tensor.device).to(tensor.dtype).expand(*tensor.shape[:-1], few).contiguous()
            )
        return tensor.narrow(dim, 0, few).contiguous()

    def changed(change: Callable[[Tensor], Tensor]) -> Any:
        flags = iter(divided.tolist())
        return each_tensor((args, kwargs), lambda tensor: change(tensor) if next(flags) else tensor)

    with _evaluating(model):
        whole, parts = changed(lambda tensor: _gathered(cut(tensor), comm, dim)), changed(cut)
        expected = model(*whole[0], **whole[1])
        with _in_the_place_of_its_layout(shared, small), shared.running():
            calls = shared.calls
            found = model(*parts[0], **parts[1])
    differing = torch.zeros(1, dtype=torch.float64)
    worst = ""
    for (path, one), (_, other) in zip(leaves(expected), leaves(found), strict=False):
        part = _part_of(one, other, small, comm.rank)
        if part is not None:
            off = float((part - other).double().norm() / part.double().norm().clamp(min=1e-30))
            limit = TOLERANCE.get(part.dtype, IN_HALF)
            if not off / limit <= differing.item():
                differing[0], worst = off / limit, f"{'.'.join(map(str, path)) or 'its result'} by {off:.2g}"
    differing = differing.to(comm.device or "cpu")
    comm.all_reduce(differing, "context-parallel", dist.ReduceOp.MAX).wait()
    if differing.item() <= 1 and shared.calls > calls:
        return
    what = f"the model computes something else of a sequence that is divided over {comm.size} ranks"
    if shared.calls == calls:
        what = f"the model has called F.scaled_dot_product_attention not once in a forward over {comm.size} ranks"
    raise ValueError(
        f"sequence_parallel_size: {what}{f' ({worst}, here)' if worst else ''}. Attention has to be torch's "
        "F.scaled_dot_product_attention, in nn.MultiheadAttention with need_weights=False; positions those of "
        "dsprof.engine.sequence.positions(length, device), or an input; and nothing else, such as a convolution or a "
        'pooling, may mix positions. If the model is right as it is, write "context_parallel": {"check": false}'
    )


def _note(seen: list[bool], tensor: Tensor, flag: bool) -> Tensor:
    seen.append(flag)
    return tensor


def _gathered(part: Tensor, comm: Comm, dim: int) -> Tensor:
    """Every rank's, one behind the other along `dim`."""
    rows = part.new_empty((comm.size, *part.shape))
    rows[comm.rank] = part
    comm.all_gather(rows.view(comm.size, -1).view(torch.uint8), "context-parallel").wait()
    return torch.cat(rows.unbind(), dim)


def _part_of(whole: Any, mine: Any, layout: Layout, rank: int) -> Tensor | None:
    """What is to be `mine` of a result for a whole sequence; None for what has no positions."""
    if not isinstance(whole, Tensor) or not isinstance(mine, Tensor) or not mine.is_floating_point():
        return None
    differ = [dim for dim, (one, other) in enumerate(zip(whole.shape, mine.shape, strict=False)) if one != other]
    if whole.dim() != mine.dim() or len(differ) != 1:
        return None
    dim = differ[0]
    if (whole.shape[dim], mine.shape[dim]) != (layout.length, layout.lengths[rank]):
        return None
    return layout.part(whole, dim, rank)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without gradients or dropout; afterwards every module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def _in_the_place_of_its_layout(shared: SequenceParallel, layout: Layout) -> Iterator[None]:
    before, shared.layout = shared.layout, layout
    try:
        yield
    finally:
        shared.layout = before
