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
    each_tensor(
        (args, kwargs),
        lambda t: _note(seen, t, has_positions(t, dim, len(mine)) and not _of_whole(t, layout.length)),
    )
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

    def kept(tensor: Tensor) -> Tensor:
        """A mask of whole sequences, as one of the few positions."""
        if not _of_whole(tensor, layout.length):
            return tensor
        columns = tensor.narrow(-1, 0, small.length)
        return columns.narrow(-2, 0, small.length) if tensor.shape[-2] == layout.length else columns

    def changed(change: Callable[[Tensor], Tensor]) -> Any:
        flags = iter(divided.tolist())
        return each_tensor((args, kwargs), lambda tensor: change(tensor) if next(flags) else kept(tensor))

    with _evaluating(model):
        whole, parts = changed(lambda tensor: _gathered(cut(tensor), comm, dim)), changed(cut)
        with _outputs(model) as of_whole:
            expected = model(*whole[0], **whole[1])
        with _in_the_place_of_its_layout(shared, small), shared.running(), _outputs(model) as of_parts:
            calls = shared.calls
            found = model(*parts[0], **parts[1])
    results = [
        (".".join(map(str, path)) or "its result", _part_of(one, other, small, comm.rank), other)
        for (path, one), (_, other) in zip(leaves(expected), leaves(found), strict=False)
    ]
    if all(part is None for _, part, _ in results):  # a model that returns its loss: what it is computed of
        results = [
            (name, _part_of(one, other, small, comm.rank), other)
            for (name, one), (_, other) in zip(of_whole, of_parts, strict=False)
        ]
        results = [each for each in results if each[1] is not None][-1:]
    differing = torch.zeros(1, dtype=torch.float64)
    worst = ""
    for name, part, other in results:
        if part is not None:
            off = float((part - other).double().norm() / part.double().norm().clamp(min=1e-30))
            limit = TOLERANCE.get(part.dtype, IN_HALF)
            if not off / limit <= differing.item():
                differing[0], worst = off / limit, f"{name} by {off:.2g}"
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


def _of_whole(tensor: Tensor, length: int) -> bool:
    """Whether a tensor is a mask of whole sequences of `length` positions: [..., length or 1, length]."""
    return tensor.dim() > 1 and tensor.shape[-1] == length and tensor.shape[-2] in (1, length)


@contextlib.contextmanager
def _outputs(model: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """What each module returns in this block, where that is a tensor, in the order in which they do."""
    found: list[tuple[str, Tensor]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                found.append((name, output))

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_modules() if name]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


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
