"""Sequences divided over ranks, held against whole ones in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from config_coverage import alive
from ranks import Ranks
from spans import recorded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsprof import engine as ds
from dsprof.engine.comm.comm import Comm
from dsprof.engine.config import ConfigError, load
from dsprof.engine.config.parallel import ContextParallelConfig
from dsprof.engine.sequence import SequenceParallel, positions
from dsprof.engine.sequence.layout import divide

VOCABULARY, WIDTH, LENGTH, STEPS = 13, 16, 11, 3


class Layer(nn.Module):
    """Attention with `groups` key-value heads for `heads` heads, and an MLP."""

    def __init__(self, heads: int, groups: int, causal: bool, recompute: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.causal, self.recompute = heads, groups, causal, recompute
        size = WIDTH // heads
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, size * (heads + 2 * groups))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and self.training:
            found: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return found
        return self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, -1, WIDTH // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(
                [WIDTH, *[WIDTH // self.heads * self.groups] * 2], dim=-1
            )
        )  # fmt: skip
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.groups < self.heads)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))
        mixed: Tensor = x + self.mlp(x)
        return mixed


class Language(nn.Module):
    def __init__(
        self, heads: int = 4, groups: int = 4, causal: bool = True, recompute: bool = False, counts: bool = False
    ) -> None:
        super().__init__()
        self.counts = counts
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Layer(heads, groups, causal, recompute) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        at = torch.arange(length) if self.counts else positions(length, ids.device)
        x = self.tokens(ids) + self.places(at)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def language(dtype: torch.dtype = torch.float64, **kind: Any) -> Language:
    torch.manual_seed(3)
    return Language(**kind).to(dtype)


def data(replicas: int, accumulate: int, length: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels [steps, micro-batches, replicas, 2, length]; some labels do not count, in one sequence none
    of the first half."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCABULARY, (STEPS, accumulate, replicas, 2, length), generator=generator)
    labels = torch.roll(ids, -1, -1)
    labels[..., -1] = -100
    labels[0, :, 0, :, : length // 2 + 1] = -100
    return ids, labels


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def alone(kind: dict[str, Any], replicas: int, accumulate: int, length: int) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and weights of one process."""
    model = language(**kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step_ids, step_labels in zip(*data(replicas, accumulate, length), strict=True):
        total = 0.0
        for ids, labels in zip(step_ids.flatten(0, 1), step_labels.flatten(0, 1), strict=True):
            loss = loss_of(model(ids), labels) / (accumulate * replicas)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model.state_dict()


def configuration(size: int, stage: int = 0, accumulate: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulate, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "sequence_parallel_size": size,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40}, **more,
    }  # fmt: skip


def divided(
    rank: int, config: dict[str, Any], kind: dict[str, Any], length: int
) -> tuple[list[float], dict[str, Tensor]]:
    """The same of ranks that share sequences."""
    engine, _, _, _ = ds.initialize(model=language(**kind), config=config)
    mesh, losses = engine.parallel.mesh, []
    for step_ids, step_labels in zip(*data(mesh.replicas, config["gradient_accumulation_steps"], length), strict=True):
        total = 0.0
        for ids, labels in zip(step_ids, step_labels, strict=True):
            mine, targets = engine.shard_sequence((ids[mesh.replica], labels[mesh.replica]))
            loss = loss_of(engine(mine), targets)
            engine.backward(loss)
            total += engine.sequence_mean(loss).item() / len(step_ids)
            engine.step()
        losses.append(total)
    engine.destroy()
    return losses, engine.module.state_dict()


def compare(
    ranks: Ranks, size: int, world: int, stage: int, kind: dict[str, Any], accumulate: int = 1, length: int = LENGTH,
    **more: Any,
) -> None:  # fmt: skip
    """Losses and weights of `world` ranks, `size` of which share each sequence, against those of one process."""
    replicas = world // size
    losses, weights = alone(kind, replicas, accumulate, length)
    found = ranks.run(world, divided, configuration(size, stage, accumulate, **more), kind, length)
    means = torch.tensor([each for each, _ in found], dtype=torch.float64).mean(0)
    torch.testing.assert_close(means, torch.tensor(losses, dtype=torch.float64), rtol=0, atol=1e-9)
    for _, after in found:
        torch.testing.assert_close(after, weights, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("size", "world", "stage", "kind", "accumulate"),
    [
        (2, 2, 0, {"groups": 2}, 2),
        (2, 4, 1, {"groups": 1, "recompute": True}, 1),
        (4, 4, 2, {"causal": False, "groups": 2}, 2),
        (2, 4, 3, {"recompute": True, "groups": 2}, 2),
        (4, 4, 3, {"groups": 4}, 1),
    ],
)
def test_ulysses_trains_as_one_process(
    ranks: Ranks, size: int, world: int, stage: int, kind: dict[str, Any], accumulate: int
) -> None:
    """Losses and weights in float64, of a length that no number of ranks divides, and labels that do not count."""
    compare(ranks, size, world, stage, kind, accumulate)


@pytest.mark.parametrize(
    ("size", "world", "stage", "kind", "accumulate", "order"),
    [
        (2, 2, 3, {"groups": 2, "recompute": True}, 2, "zigzag"),
        (4, 4, 0, {"groups": 1, "heads": 2}, 1, "zigzag"),
        pytest.param(4, 4, 1, {"groups": 2}, 1, "contiguous", marks=pytest.mark.slow),
        (2, 4, 2, {"causal": False, "groups": 2}, 1, "contiguous"),
        pytest.param(4, 4, 3, {"causal": False}, 1, "zigzag", marks=pytest.mark.slow),
    ],
)
def test_a_ring_trains_as_one_process(
    ranks: Ranks, size: int, world: int, stage: int, kind: dict[str, Any], accumulate: int, order: str
) -> None:
    """The same; also with fewer heads than ranks. In `make test` each stage but 1, and each order."""
    keys = {"attention": "ring", "order": order}
    compare(ranks, size, world, stage, kind, accumulate, context_parallel=keys)


def ahead(rank: int, evaluates: bool) -> list[float]:
    """Losses of whole sequences where the next batch is divided, and one is evaluated, between forward and backward."""
    engine = ds.initialize(model=language(recompute=True), config=configuration(2))[0]
    ids, labels = data(1, 1, LENGTH)
    losses = []
    batch = engine.shard_sequence((ids[0, 0, 0], labels[0, 0, 0]))
    for step in range(STEPS):
        mine, targets = batch
        loss = loss_of(engine(mine), targets)
        if evaluates:
            other, its = engine.shard_sequence((ids[0, 0, 0, :, :7], labels[0, 0, 0, :, :7]))
            with torch.no_grad():
                engine.sequence_mean(loss_of(engine(other), its))
        batch = engine.shard_sequence((ids[(step + 1) % STEPS, 0, 0], labels[(step + 1) % STEPS, 0, 0]))
        engine.backward(loss)
        losses.append(engine.sequence_mean(loss).item())
        engine.step()
    engine.destroy()
    return losses


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_batch_that_is_divided_ahead_counts_when_it_is_computed(ranks: Ranks, evaluates: bool) -> None:
    expected, _ = alone({}, 1, 1, LENGTH)
    assert ranks.run(2, ahead, evaluates)[0] == pytest.approx(expected, abs=1e-8)


def means(rank: int) -> list[Tensor]:
    engine = ds.initialize(model=language(), config=configuration(2))[0]
    ids, labels = (each[0, 0, 0] for each in data(1, 1, LENGTH))
    engine(engine.shard_sequence((ids, labels))[0])
    nothing = loss_of(torch.zeros(1, 1, VOCABULARY), torch.tensor([[-100]]))  # as rank 0, whose labels do not count
    found = [
        engine.sequence_mean(nothing if rank == 0 else torch.tensor(loss, dtype=dtype))
        for loss, dtype in ((1.5, torch.float32), (float("nan"), torch.float32), (1.01, torch.float32))
    ]
    engine.destroy()
    return found


def test_a_loss_that_is_not_finite_is_not_called_zero(ranks: Ranks) -> None:
    """But what a rank has for a mean over nothing is left out."""
    for one, lost, other in ranks.run(2, means):
        assert one.item() > 0
        assert lost.isnan()
        assert other.item() == pytest.approx(1.01 * one.item() / 1.5)


def half(rank: int, folder: str) -> tuple[list[float], list[float], float]:
    """Losses in bf16 of ranks that share sequences, and on from a checkpoint, by `train_batch`; the largest difference
    of a weight from the ranks' that go on, in another stage and each with sequences of its own."""
    ids, labels = data(1, 1, LENGTH)
    batches = [{"ids": i[0, 0], "labels": t[0, 0]} for i, t in zip(ids, labels, strict=True)]

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = language(torch.float32, groups=2)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return loss_of(self.inner(ids).float(), labels)

    def start(size: int, stage: int) -> Any:
        return ds.initialize(model=WithLoss(), config=configuration(size, stage, bf16={"enabled": True}))[0]

    engine = start(2, 2)
    first = [engine.train_batch(iter([batch])).item() for batch in batches]
    engine.save_checkpoint(folder)
    then = [engine.train_batch(iter([batch])).item() for batch in batches]
    engine.destroy()
    other = start(1, 1)
    other.load_checkpoint(folder)
    again = [other.train_batch(iter([batch])).item() for batch in batches]
    other.destroy()
    off = max(
        float((one - another).abs().max())
        for one, another in zip(engine.module.parameters(), other.module.parameters(), strict=True)
    )
    return first + then, then[:1] + again, off


def test_bf16_checkpoints_and_train_batch(ranks: Ranks, tmp_path: Path) -> None:
    """A checkpoint loads where sequences are divided otherwise, and training goes on as it did."""
    (losses, again, off), second = ranks.run(2, half, str(tmp_path))
    assert losses == second[0], "train_batch returns the mean of whole sequences, the same on every rank"
    assert losses[-1] < losses[0] - 0.1
    assert max(abs(one - other) for one, other in zip(losses[len(losses) // 2 :], again[1:], strict=True)) < 0.03
    assert off < 0.05


class Scores(nn.Module):
    """Attention that is written out, beside one that is torch's."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.project = how, nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.project(x)
        length = x.shape[1]
        if self.how == "written out":
            y = F.scaled_dot_product_attention(*[y.view(*y.shape[:2], 4, 2).transpose(1, 2)] * 3).transpose(1, 2)
            scores: Tensor = y.reshape(x.shape) @ x.transpose(1, 2)
            return scores.softmax(-1) @ x
        if self.how == "not at all":
            return y
        if self.how == "weights":
            return self.attention(y, y, y)[0]  # type: ignore[no-any-return]
        if self.how == "module":
            return self.attention(y, y, y, need_weights=False)[0]  # type: ignore[no-any-return]
        if self.how == "encoder":
            causal = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
            return self.encoder(y, causal, is_causal=True)  # type: ignore[no-any-return]
        y = y.view(*x.shape[:2], 4, 2).transpose(1, 2)
        if self.how == "flat":
            return F.scaled_dot_product_attention(*[y.flatten(0, 1)] * 3)
        if self.how == "three heads":
            return F.scaled_dot_product_attention(*[y[:, :3]] * 3)
        if self.how == "other keys":
            return F.scaled_dot_product_attention(y, y[:, :, 1:], y[:, :, 1:])
        if self.how == "own mask":
            mask = torch.ones(length, length, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(y, y, y, mask).transpose(1, 2).flatten(2)


def tried(rank: int, hows: list[str]) -> list[tuple[str, float]]:
    """Of each model what a forward raises, or how far its result is from that of the whole sequence."""
    x = torch.randn(3, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole_mask = torch.rand(3, 4, 9, 9, generator=torch.Generator().manual_seed(2)) < 0.7
    whole_mask[..., 0] = True
    found = []
    for how in hows:
        torch.manual_seed(1)
        model = Scores(how).double()
        given = (whole_mask,) if how == "whole mask" else ()
        expected = model(x, *given).detach()
        engine = ds.initialize(model=model, config=configuration(2))[0]
        try:
            if how != "whole":
                part = engine.shard_sequence(x)
            out = engine(x if how == "whole" else part, *given)
            mine = engine.state.sequence.layout.part(expected, 1, rank)
            engine.eval()
            with torch.no_grad():
                again = engine(part, *given)
            found.append(("", max(float((y.detach() - mine).abs().max()) for y in (out, again))))
        except (ValueError, RuntimeError) as error:
            found.append((str(error), 0.0))
        engine.destroy()
    return found


UNSEEN = {
    "written out": "the model computes something else of a sequence that is divided over 2 ranks",
    "not at all": "has called F.scaled_dot_product_attention not once",
    "weights": "has called F.scaled_dot_product_attention not once",
    "flat": "the attention got queries of shape [12, 4, 2]: where ranks share sequences they must be [batch, heads",
    "three heads": "attention of 3 heads cannot be divided over 2 ranks (sequence_parallel_size)",
    "other keys": "the attention got keys of 3 positions, and this rank has 4 of the 8 of a sequence",
    "own mask": "which does not cover the 8 positions of a whole sequence",
    "whole": "the attention got queries of 9 positions, and no batch has been divided among the 2 ranks that share",
}


def test_what_cannot_be_divided_is_named(ranks: Ranks) -> None:
    hows = list(UNSEEN)
    for found in ranks.run(2, tried, hows):
        for how, (message, _) in zip(hows, found, strict=True):
            assert UNSEEN[how] in message, how


def test_attention_in_torchs_own_modules_and_with_a_mask_of_whole_sequences(ranks: Ranks) -> None:
    hows = ["module", "encoder", "whole mask"]
    for found in ranks.run(2, tried, hows):
        assert [message for message, _ in found] == ["", "", ""]
        assert max(off for _, off in found) < 1e-12


def seen(rank: int, config: dict[str, Any], counts: bool) -> tuple[int, list[tuple[str, Any, Any]], str]:
    """Positions that this rank's model gets, the collectives of a forward and backward, and what is raised."""
    engine = ds.initialize(model=language(counts=counts), config=config)[0]
    ids, labels = (each[0, 0, 0] for each in data(1, 1, LENGTH))
    mine, targets = engine.shard_sequence((ids, labels))
    try:
        if config.get("context_parallel", {}).get("check", True):
            engine(mine)
        with recorded() as spans:
            engine.backward(loss_of(engine(mine), targets))
        says = ""
    except ValueError as error:
        spans, says = [], str(error)
    comms = [(span.name, span.purpose, span.bytes) for span in spans if span.kind == "comm"]
    engine.destroy()
    return mine.shape[1], comms, says


@alive("sequence_parallel_size")
def test_an_attention_takes_two_all_to_alls_each_way(ranks: Ranks) -> None:
    """They have a purpose of their own. Without the key every rank has the whole sequence."""
    of_ranks = ranks.run(2, seen, configuration(2), False)
    assert [length for length, _, _ in of_ranks] == [5, 6]
    for length, comms, _ in of_ranks:
        exchanges = [each for each in comms if each[1] == "context-parallel"]
        assert [name for name, _, _ in exchanges] == ["all_to_all"] * 2 * 2 * 2
        of_all, of_half = 2 * length * WIDTH * 8, 2 * LENGTH * WIDTH // 2 * 8  # float64; positions, and heads
        assert exchanges[0][2] == 3 * max(of_all, of_half)
    assert all((length, [each for each in comms if each[0] == "all_to_all"]) == (LENGTH, [])
               for length, comms, _ in ranks.run(2, seen, configuration(1), False))  # fmt: skip


@alive("context_parallel.attention", "context_parallel.order")
def test_keys_and_values_go_round_once_and_back_with_their_gradients(ranks: Ranks) -> None:
    """Of two ranks: one exchange in a layer's forward; in its backward that again, and two of gradients. Which
    positions a rank has, the order says."""
    for order, lengths in (("contiguous", [5, 6]), ("zigzag", [5, 6])):
        keys = {"attention": "ring", "order": order}
        for (length, comms, _), expected in zip(
            ranks.run(2, seen, configuration(2, context_parallel=keys), False), lengths, strict=True
        ):
            assert length == expected
            assert [name for name, purpose, _ in comms if purpose == "context-parallel"] == ["all_to_all"] * 2 * (1 + 3)
    in_order = [ranks.run(2, held, configuration(2, context_parallel={"attention": "ring", "order": order}))
                for order in ("contiguous", "zigzag")]  # fmt: skip
    assert in_order == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 6, 7], [2, 3, 4, 5]]]


def held(rank: int, config: dict[str, Any]) -> list[int]:
    """The positions of 8 that are this rank's."""
    engine = ds.initialize(model=language(), config=config)[0]
    mine: list[int] = engine.shard_sequence(torch.arange(8)[None])[0].tolist()
    engine.destroy()
    return mine


def test_what_a_ring_does_not_take() -> None:
    config = ContextParallelConfig(attention="ring", order="contiguous")
    shared = SequenceParallel(Comm(None, None), config, nn.Linear(1, 1))
    x = shared.divide(torch.zeros(1, 4, 8)).view(1, 2, 4, 4)
    shared.begin_forward(x)
    with shared.running():
        for what, more in (("dropout", {"dropout_p": 0.1}), ("a mask", {"attn_mask": torch.ones(4, 4).bool()})):
            with pytest.raises(ValueError, match=f"the attention got {what}, which keys and values that go round"):
                F.scaled_dot_product_attention(x, x, x, **more)  # type: ignore[arg-type]


@alive("context_parallel.check")
def test_positions_that_each_rank_counts_from_zero_are_found(ranks: Ranks) -> None:
    says = [error for _, _, error in ranks.run(2, seen, configuration(2), True)]
    assert all("the model computes something else of a sequence that is divided over 2 ranks" in each for each in says)
    assert "(its result by " in says[1], "rank 0 begins with position 0, as a model that counts from 0 does"
    unchecked = configuration(2, context_parallel={"check": False})
    assert [error for _, _, error in ranks.run(2, seen, unchecked, True)] == ["", ""]


class WithLoss(nn.Module):
    """A model that returns its loss alone."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.inner = language(counts=counts)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return loss_of(self.inner(ids), labels)


def of_losses(rank: int) -> list[str]:
    """What is raised for a model that returns its loss, and has positions of the sequence, or of this rank's part."""
    ids, labels = (each[1, 0, 0] for each in data(1, 1, LENGTH))
    found = []
    for counts in (False, True):
        engine = ds.initialize(model=WithLoss(counts), config=configuration(2, 3))[0]
        try:
            engine(*engine.shard_sequence((ids, labels)))
            found.append("")
        except ValueError as error:
            found.append(str(error))
        engine.destroy()
    return found


def test_a_model_that_returns_its_loss_is_held_against_the_whole_one_too(ranks: Ranks) -> None:
    for rank, (right, wrong) in enumerate(ranks.run(2, of_losses)):
        assert right == ""
        assert "the model computes something else of a sequence that is divided over 2 ranks" in wrong
        assert not rank or "(inner by " in wrong


def other_data(rank: int) -> str:
    engine = ds.initialize(model=language(), config=configuration(2))[0]
    try:
        engine.shard_sequence(torch.full((2, 8), rank))
    except ValueError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_ranks_with_other_data_are_named(ranks: Ranks) -> None:
    for says in ranks.run(2, other_data):
        assert "(context-parallel rank 1) differs in its values" in says
        assert "these ranks share sequences and must get the same batch" in says


def test_lengths_that_do_not_divide() -> None:
    layout = divide(11, 4)
    assert layout.lengths == [2, 3, 3, 3]
    assert [layout.positions(rank).tolist() for rank in range(4)] == [[0, 1], [2, 3, 4], [5, 6, 7], [8, 9, 10]]
    with pytest.raises(ValueError, match="a sequence of 3 positions cannot be divided over 4 ranks"):
        divide(3, 4)
    layout = divide(11, 2, zigzag=True)
    assert [layout.positions(rank).tolist() for rank in range(2)] == [[0, 1, 8, 9, 10], [2, 3, 4, 5, 6, 7]]
    with pytest.raises(ValueError, match="a sequence of 3 positions cannot be divided over 2 ranks in zigzag"):
        divide(3, 2, zigzag=True)


class DialogForCausalLM(nn.Module):
    """As those of transformers."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor, shift_labels: Tensor) -> Tensor:
        return input_ids


def test_batches_of_transformers() -> None:
    """Labels are those of the next position, and positions those of the whole sequence; what has none stays whole."""
    shared = SequenceParallel(Comm(None, None), ContextParallelConfig(), DialogForCausalLM())
    ids = torch.arange(10).view(2, 5)
    batch = shared.divide({"input_ids": ids, "labels": ids, "name": "x", "weights": torch.ones(2)})
    assert batch["labels"].tolist() == batch["shift_labels"].tolist() == [[1, 2, 3, 4, -100], [6, 7, 8, 9, -100]]
    assert batch["position_ids"].tolist() == [list(range(5))] * 2
    assert batch["name"] == "x"
    assert batch["weights"].shape == (2,)
    assert shared.divide({"input_ids": ids, "labels": ids}, shift=False)["labels"].tolist() == ids.tolist()


class Masked(nn.Module):
    def forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return input_ids


def test_the_gap_between_two_pieces_is_no_border_of_packed_sequences() -> None:
    """transformers makes a mask where positions have a gap and there is no mask; there is one of ones. Positions that
    the script gives may be those of packed sequences: it stays what it was."""
    zigzag, pieces = (
        SequenceParallel(Comm(None, None), ContextParallelConfig(attention=attention), Masked())
        for attention in ("ring", "ulysses")
    )
    ids = torch.arange(10).view(2, 5)
    assert zigzag.divide({"input_ids": ids})["attention_mask"].tolist() == [[1] * 5] * 2
    padded = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert zigzag.divide({"input_ids": ids, "attention_mask": padded})["attention_mask"].tolist() == padded.tolist()
    assert "attention_mask" not in zigzag.divide({"input_ids": ids, "position_ids": torch.zeros_like(ids)})
    assert "attention_mask" not in pieces.divide({"input_ids": ids})


@pytest.mark.parametrize(
    ("more", "world", "says"),
    [
        ({"sequence_parallel_size": 3}, 4,
         "sequence_parallel_size: 3 does not divide the 4 data-parallel ranks; write 1, 2 or 4"),
        ({"sequence_parallel_size": 2, "pipeline": {"stages": 2}}, 4,
         "sequence_parallel_size: 2, which does not go together with pipeline.stages; remove one of them"),
        ({"sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": 2}}, 4,
         "sequence_parallel_size: 2, which does not go together with tensor_parallel.autotp_size; remove one of them"),
        ({"sequence_parallel_size": 2, "heterogeneous": {"speeds": [1, 2]}}, 2,
         "sequence_parallel_size: 2, which does not go together with heterogeneous.speeds; remove one of them"),
        ({"sequence_parallel_size": 0}, 2,
         "sequence_parallel_size: 0 is not a whole number at least 1; the default is 1"),
    ],
)  # fmt: skip
def test_configurations_that_cannot_be(more: dict[str, Any], world: int, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load({"train_micro_batch_size_per_gpu": 1, **more}, world_size=world)
    assert says in error.value.problems


def test_ranks_that_share_sequences_count_as_one_in_the_batch() -> None:
    config = load({"train_micro_batch_size_per_gpu": 3, "sequence_parallel_size": 4}, world_size=8)
    assert config.train_batch_size == 6
