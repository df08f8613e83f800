"""Ranks that share sequences: what divides a batch among them, counts their losses, and replaces the attention."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..comm.comm import Comm
from ..config.parallel import ContextParallelConfig
from ..optim.loss_scaler import widened
from ..tensor.check_data import check_same
from ..tree import each_tensor, leaves
from .layout import Layout, divide
from .ring import ring
from .ulysses import ulysses

IGNORED: Final = -100
"""The label of a position that counts into no loss: `ignore_index` of torch's cross entropy."""
LABELS: Final = (torch.int64, torch.int32, torch.int16)
SHARD_IT: Final = "divide the batch by engine.shard_sequence(batch), and pass the model what that returns"
_TORCH: Final = F.scaled_dot_product_attention

_running: list[SequenceParallel] = []
"""Whose model computes now: none outside of a forward or backward."""


def positions(length: int, device: torch.device | None = None) -> Tensor:
    """The places in the sequence of the `length` positions that a model's forward is at, int64: those of this rank's
    part where ranks share sequences, else 0 to length - 1. Write it in place of `torch.arange` for position embeddings.
    """
    if not _running:
        return torch.arange(length, device=device)
    return _running[-1].positions(length, device)


@dataclass(frozen=True)
class Divided:
    """What is to be known of a batch that was divided."""

    layout: Layout
    dim: int
    weight: float
    """What this rank's mean loss counts in that of the whole batch, beside an equal share."""


class SequenceParallel:
    """What the ranks of `comm` that share sequences do to the data, the loss and the attention of `model`."""

    def __init__(self, comm: Comm, config: ContextParallelConfig, model: nn.Module) -> None:
        self.comm = comm
        self.unchecked = config.check
        """Whether the model has not been tried whole and divided yet."""
        self.layout: Layout | None = None
        """Of the batch that the model computes with, as `dim` and `weight` are."""
        self.dim = 1
        self.weight = 1.0
        self._last: Divided | None = None
        """The batch that was divided last."""
        self._goes_back: Divided | None = None
        """The one that a forward with gradients had last."""
        self._divided: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """This rank's part of a tensor -> `Divided`."""
        self.calls = 0
        """Attentions that were computed so far."""
        self._ring = config.attention == "ring"
        self._zigzag = self._ring and config.order == "zigzag"
        self._model = model
        self._places = _places_of_attention(model)

    # --- data

    def divide(self, batch: Any, dim: int = 1, shift: bool | None = None, *, check_data: bool = False) -> Any:
        """See `Engine.shard_sequence`. `check_data`: whether to hold the batch against that of the others."""
        if check_data:
            check_same(batch, self.comm, "context-parallel")
        found = [leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > dim]
        if not found:
            raise ValueError(
                f"engine.shard_sequence: no tensor of the batch has a dimension {dim}, where the positions of the "
                "sequence are to be; say where they are, dim="
            )
        if isinstance(batch, Mapping):
            batch = self._for_transformers(dict(batch), shift)
        length = found[0].shape[dim]
        layout, rank = divide(length, self.comm.size, zigzag=self._zigzag), self.comm.rank
        self._last = divided = Divided(layout, dim, self._weight(batch, layout, dim))

        def mine(tensor: Tensor) -> Tensor:
            if not has_positions(tensor, dim, length):
                return tensor
            part = layout.part(tensor, dim, rank)
            self._divided[part] = divided
            return part

        return each_tensor(batch, mine)

    def begin_forward(self, *given: Any) -> None:
        """The model is `given` a batch, which need not be the one that was divided last: the next may be there, or one
        to evaluate. Of tensors that `divide` has not returned it is."""
        known = (self._divided.get(leaf) for _, leaf in leaves(given) if isinstance(leaf, Tensor))
        divided = next((each for each in known if each is not None), self._last)
        self._computes_with(divided)
        if torch.is_grad_enabled():
            self._goes_back = divided

    def begin_backward(self) -> None:
        """Of the last forward that had gradients."""
        self._computes_with(self._goes_back)

    def _computes_with(self, divided: Divided | None) -> None:
        if divided is not None:
            self.layout, self.dim, self.weight = divided.layout, divided.dim, divided.weight

    def mean(self, loss: Tensor) -> Tensor:
        """The mean loss over whole sequences, of each rank's over its part. Without a gradient; on all ranks."""
        loss = widened(loss.detach()) if self.weight else torch.zeros_like(widened(loss.detach()))
        total = (loss * self.weight / self.comm.size).reshape(1)
        self.comm.all_reduce(total, "context-parallel").wait()
        return total.view(loss.shape)

    def weighted(self, loss: Tensor) -> Tensor:
        """The loss such that the mean of all ranks' gradients is that of the mean over whole sequences."""
        if self.weight == 0.0:
            loss = torch.nan_to_num(loss)  # a mean over nothing
        return loss * self.weight if self.weight != 1.0 else loss

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Of this rank's part."""
        self._check_length(length, "positions of a sequence are asked for")
        assert self.layout is not None
        return self.layout.positions(self.comm.rank, device)

    def _weight(self, batch: Any, layout: Layout, dim: int) -> float:
        """By the labels that count, where some do not; else by positions."""
        rank = self.comm.rank
        for _, leaf in leaves(batch):
            if isinstance(leaf, Tensor) and leaf.dtype in LABELS and has_positions(leaf, dim, layout.length):
                counted = leaf != IGNORED
                mine, every = layout.part(counted, dim, rank).sum().item(), counted.sum().item()
                if every < leaf.numel():
                    return self.comm.size * mine / every if every else 1.0
        return self.comm.size * layout.lengths[rank] / layout.length

    def _for_transformers(self, batch: dict[str, Any], shift: bool | None) -> dict[str, Any]:
        """A batch with what models of transformers make themselves of whole sequences: positions, and labels that are
        those of the next position."""
        ids, labels = batch.get("input_ids"), batch.get("labels")
        takes = inspect.signature(self._model.forward).parameters
        if isinstance(ids, Tensor) and "position_ids" in takes and "position_ids" not in batch:
            batch["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
            if self._zigzag and "attention_mask" in takes:
                # Where there is no mask, transformers takes the gap between a rank's two pieces for the border of two
                # sequences that are packed into one, and makes a mask of that.
                batch.setdefault("attention_mask", torch.ones_like(ids))
        if shift is None:
            shift = type(self._model).__name__.endswith(("ForCausalLM", "LMHeadModel")) and "shift_labels" not in batch
        if shift and isinstance(labels, Tensor):
            batch["labels"] = batch["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return batch

    # --- attention

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """In this block `F.scaled_dot_product_attention` is that of whole sequences."""
        fused = torch.backends.mha.get_fastpath_enabled()  # which computes attention by itself, in evaluation
        before = [getattr(place, name) for place, name in self._places]
        torch.backends.mha.set_fastpath_enabled(False)
        for place, name in self._places:
            setattr(place, name, self._attention)
        _running.append(self)
        try:
            yield
        finally:
            _running.pop()
            for (place, name), function in zip(self._places, before, strict=True):
                setattr(place, name, function)
            torch.backends.mha.set_fastpath_enabled(fused)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        for what, tensor in (("queries", query), ("keys", key)):
            self._check_length(tensor.shape[-2], f"the attention got {what} of")
        if query.dim() != 4:
            raise ValueError(
                f"the attention got queries of shape {list(query.shape)}: where ranks share sequences they must be "
                "[batch, heads, positions, features]"
            )
        assert self.layout is not None
        if attn_mask is not None:
            attn_mask = _whole_mask(attn_mask, self.layout)
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        self.calls += 1
        if self._ring:
            for what in [
                name for name, given in (("a mask", attn_mask is not None), ("dropout", dropout_p > 0)) if given
            ]:
                raise ValueError(
                    f"the attention got {what}, which keys and values that go round the ranks do not take: write "
                    '"context_parallel": {"attention": "ulysses"}, or for a causal mask pass is_causal=True alone'
                )
            return ring(self.comm, self.layout, query, key, value, is_causal, scale)
        return ulysses(
            _TORCH, self.comm, self.layout, query, key, value, attn_mask,
            dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip

    def _check_length(self, length: int, what: str) -> None:
        if self.layout is None:
            raise RuntimeError(
                f"{what} {length} positions, and no batch has been divided among the {self.comm.size} ranks that share "
                f"sequences: {SHARD_IT}"
            )
        mine = self.layout.lengths[self.comm.rank]
        if length != mine:
            raise ValueError(
                f"{what} {length} positions, and this rank has {mine} of the {self.layout.length} of a sequence "
                f"(sequence_parallel_size): {SHARD_IT}. Attention between two sequences, or over a part of one, cannot "
                "be divided"
            )


def has_positions(tensor: Tensor, dim: int, length: int) -> bool:
    """Whether a tensor of a batch is of so many positions, in the dimension `dim`."""
    return tensor.dim() > dim and tensor.shape[dim] == length


def _whole_mask(mask: Tensor, layout: Layout) -> Tensor:
    """Raise ValueError unless a mask is one of whole sequences."""
    if mask.shape[-1] == layout.length and (mask.dim() < 2 or mask.shape[-2] in (1, layout.length)):
        return mask
    raise ValueError(
        f"the attention got a mask of shape {list(mask.shape)}, which does not cover the {layout.length} positions of "
        "a whole sequence (sequence_parallel_size): for a causal mask pass is_causal=True and no mask; another one has "
        f"to be [..., {layout.length}, {layout.length}] on every rank"
    )


def _places_of_attention(model: nn.Module) -> list[tuple[Any, str]]:
    """Where the code of a model finds torch's attention: in `torch.nn.functional`, and in modules of Python that have
    imported the function itself."""
    modules = {sys.modules.get(type(module).__module__) for module in model.modules()} - {None, F}
    found = [(module, name) for module in modules for name, value in vars(module).items() if value is _TORCH]
    return [(F, "scaled_dot_product_attention"), *found]
