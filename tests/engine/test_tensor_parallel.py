"""Shard models on several ranks: the same outputs and gradients as the whole model's, and what travels for it."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from spans import recorded
from tensor_models import (
    VOCABULARY,
    Block,
    FusedAttention,
    Gated,
    Language,
    compare,
    compare_gradients,
    error_of,
    language,
    tensor_comm,
    token_ids,
)
from torch import Tensor, nn

from dsprof import engine as ds
from dsprof.engine.activation_checkpoint.policies import Full
from dsprof.engine.hooks import Hooks
from dsprof.engine.pipe.module import PipelineModule
from dsprof.engine.tensor import (
    PlanError,
    check_same,
    parallelize,
    partial_parameters,
    plan_for,
    same_random_numbers,
    shard_of,
    vocabulary_cross_entropy,
)
from dsprof.engine.tensor.collectives import copy as copy_in
from dsprof.engine.tensor.collectives import gather, join, reduce, reduce_scatter, split

# --- the operators


def operators_in_pairs(rank: int) -> None:
    comm = tensor_comm()
    size = comm.size
    whole = torch.arange(4.0 * size * 3, dtype=torch.float64).view(2, 2 * size, 3)
    mine = whole.chunk(size, 1)[rank]
    scaled = whole * (rank + 1)
    everyone = whole * sum(range(1, size + 1))
    for found, expected in (
        (copy_in(whole, comm), whole),
        (reduce(scaled, comm), everyone),
        (gather(mine, comm, 1), whole),
        (join(mine, comm, 1), whole),
        (split(whole, comm, 1), mine),
        (reduce_scatter(scaled, comm, 1), everyone.chunk(size, 1)[rank]),
    ):
        assert torch.equal(found, expected)
    for operator, x, dim in ((copy_in, whole, ()), (reduce, whole, ()), (gather, mine, (1,)), (join, mine, (1,)),
                             (split, whole, (1,)), (reduce_scatter, whole, (1,))):  # fmt: skip
        x = x.clone().requires_grad_()
        y = operator(x, comm, *dim)
        weights = (y.detach() + 1).requires_grad_()
        (grad,) = torch.autograd.grad((y * weights).sum(), x, create_graph=True)
        transposed = {copy_in: reduce, reduce: copy_in, gather: reduce_scatter, reduce_scatter: gather,
                      join: split, split: join}[operator]  # fmt: skip
        assert torch.equal(grad, transposed(weights, comm, *dim))
        (second,) = torch.autograd.grad((grad * grad.detach()).sum(), weights)  # backward has one, too
        assert torch.equal(second, operator(grad.detach(), comm, *dim))


def operators_of_all_kinds(rank: int) -> None:
    comm = tensor_comm()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.full((4, 6), float(rank + 1), dtype=dtype).t()  # not contiguous
        assert torch.equal(reduce(x, comm), torch.full((6, 4), 3.0, dtype=dtype))
        assert gather(x, comm, -1)[0].tolist() == [1] * 4 + [2] * 4
        assert reduce_scatter(x, comm, -1).shape == (6, 2)
        assert split(x, comm, 0).shape == (3, 4)
        assert x.max() == rank + 1  # and left alone
    x = torch.ones(2, requires_grad=True)
    y = copy_in(x, comm)
    (y * (rank + 1) + y + copy_in(x, comm)).sum().backward()  # two uses of one, and another
    assert x.grad is not None
    assert x.grad.tolist() == [7, 7]
    message = error_of(lambda: split(torch.ones(2, 3), comm, 1, "blocks.0"))
    assert message == (
        "blocks.0: dimension 1 of an activation of shape (2, 3) is sharded over 2 tensor-parallel ranks, and 3 does "
        "not divide by 2: pad it"
    )


def test_each_operator_is_the_transpose_of_its_partner(ranks: Ranks) -> None:
    ranks.run(3, operators_in_pairs)


def test_operators_take_any_dtype_and_layout(ranks: Ranks) -> None:
    ranks.run(2, operators_of_all_kinds)


# --- equivalence


def equal_to_whole(rank: int, kinds: list[str]) -> None:
    comm = tensor_comm()
    for kind in kinds:
        for sequence_parallel in (False, True):
            compare(language(kind), comm, token_ids(), sequence_parallel=sequence_parallel)


@pytest.mark.parametrize(
    ("size", "kinds"), [(1, ["fused"]), (2, ["fused", "grouped", "interleaved", "normed"]), (4, ["fused", "normed"])]
)
def test_a_sharded_model_computes_what_the_whole_one_does(ranks: Ranks, size: int, kinds: list[str]) -> None:
    """Fused, grouped (on four ranks with fewer key-value heads than ranks) and interleaved heads, a vocabulary that
    does not divide, tied and untied heads, norms of queries; each also with the sequence sharded."""
    ranks.run(size, equal_to_whole, kinds)


class Pooled(Language):
    """A sharded region behind the blocks, where the sequence is whole again."""

    def __init__(self) -> None:
        torch.manual_seed(6)
        super().__init__([Block(16, FusedAttention(16, 4), Gated(16, 8)) for _ in range(2)], 16)
        self.pool = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.norm(self.pool(x)))
        return y


def cut_outside_the_blocks(rank: int) -> None:
    comm = tensor_comm()
    plan = compare(Pooled().eval(), comm, token_ids(), sequence_parallel=True)
    assert plan.stack is not None
    assert plan.stack.last == "blocks.1"
    model = Pooled().train()
    parallelize(model, comm, plan)
    same_random_numbers(comm, torch.device("cpu"))
    seen = Seen(model.pool[2])
    logits = model(token_ids())
    masks: list[Any] = [None] * comm.size
    torch.distributed.all_gather_object(masks, (seen.zeros, logits.tolist()))
    assert masks[0][0] != masks[1][0]  # the parts drop for themselves, and their sum is the same
    assert masks[0][1] == masks[1][1]


def test_a_region_outside_the_blocks_sees_the_whole_sequence(ranks: Ranks) -> None:
    ranks.run(2, cut_outside_the_blocks)


def two_replicas(rank: int) -> None:
    comm = tensor_comm(2)
    assert (comm.size, comm.rank) == (2, rank % 2)
    compare(language("grouped"), comm, (token_ids() + rank // 2) % VOCABULARY)


def test_two_tensor_parallel_groups_work_on_data_of_their_own(ranks: Ranks) -> None:
    ranks.run(4, two_replicas)


class Attention(nn.Module):
    """torch's own, with masks and all that it returns."""

    def __init__(self, batch_first: bool, separate: bool, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        keys = 6 if separate else 16
        self.attention = nn.MultiheadAttention(16, 4, batch_first=batch_first, kdim=keys, vdim=keys)
        self.keys = nn.Linear(16, keys)
        self.separate, self.causal = separate, causal

    def forward(self, x: Tensor) -> Tensor:
        other = self.keys(x) if self.separate else x
        length = x.shape[1 if self.attention.batch_first else 0]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype) if self.causal else None
        padding = None if self.causal else torch.arange(length).expand(2, -1) >= length - 1
        y, none = self.attention(x, other, other, attn_mask=mask, key_padding_mask=padding, need_weights=False,
                                 is_causal=self.causal)  # fmt: skip
        assert none is None
        z, average = self.attention(x, other, other, attn_mask=mask, key_padding_mask=padding)
        each = self.attention(x, other, other, key_padding_mask=padding, average_attn_weights=False)[1]
        heads = torch.ones(8, length, length, dtype=torch.bool).triu(1)
        heads[::4] = False  # of each sample the first head sees all
        w = self.attention(x, other, other, attn_mask=heads)[0]
        return torch.cat([y.flatten(), z.flatten(), average.flatten(), each.flatten(), w.flatten()])


class Encoder(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.encoder(x)
        return y


def torchs_own_attention(rank: int) -> None:
    comm = tensor_comm()
    for batch_first in (True, False):
        for separate in (True, False):
            for causal in (True, False):
                shape = (2, 8, 16) if batch_first else (8, 2, 16)
                x = torch.rand(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
                model = Attention(batch_first, separate, causal)
                compare(model, comm, x, plan={"attention": "heads"}, example=x.float())
    single = nn.MultiheadAttention(16, 4, dtype=torch.float64)
    x = torch.rand(5, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = single(x, x, x)
    parallelize(single, comm, example=(x.float(), x.float(), x.float()))
    for found, value in zip(single(x, x, x), expected, strict=True):
        torch.testing.assert_close(found, value)


def torchs_own_transformer(rank: int) -> None:
    comm = tensor_comm()
    for sequence_parallel in (False, True):
        for dim in (1, 0):
            model = Encoder(batch_first=dim == 1).double()
            x = torch.rand((2, 8, 16) if dim else (8, 2, 16), generator=torch.Generator().manual_seed(2)).double()
            compare(model, comm, x, sequence_parallel=sequence_parallel, sequence_dim=dim)
            expected = model.eval()(x)
            parallelize(model, comm)
            with torch.no_grad():  # where torch takes its shortcut
                torch.testing.assert_close(model(x), expected)


def test_torchs_multihead_attention_is_sharded_by_heads(ranks: Ranks) -> None:
    ranks.run(2, torchs_own_attention)


def test_torchs_transformer_encoder_is_sharded(ranks: Ranks) -> None:
    ranks.run(2, torchs_own_transformer)


def the_example(rank: int) -> list[str]:
    comm = tensor_comm()
    file = Path(__file__).parents[2] / "examples" / "train_gpt.py"
    spec = importlib.util.spec_from_file_location("train_gpt", file)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(1)
    model = example.GPT(VOCABULARY, 8, 16, 4, 2)
    plans = [compare(model, comm, token_ids(), sequence_parallel=on) for on in (False, True)]
    return [f"{role.module}: {role.style}" for role in plans[0].roles if not role.module.startswith("blocks.1")]


def test_the_examples_gpt_is_sharded(ranks: Ranks) -> None:
    """Its fused attention takes all its sizes from its input."""
    assert ranks.run(2, the_example)[0] == [
        "token: vocab", "position: whole", "blocks.0.qkv: column", "blocks.0.out: row", "blocks.0.mlp.0: column",
        "blocks.0.mlp.2: row", "head: column_gather",
    ]  # fmt: skip


def other_uses(rank: int) -> None:
    comm = tensor_comm()
    # Evaluation, and a copy of the sharded model.
    model = language("grouped").double()
    expected = model(token_ids())
    parallelize(model, comm)
    assert torch.equal(model.head.weight, shard_of(model.head.weight).take(language("grouped").double().head.weight))  # type: ignore[union-attr]
    for used in (model, copy.deepcopy(model)):
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                torch.testing.assert_close(used(token_ids()), expected)
    assert isinstance(model.head, nn.Linear)
    assert repr(model.head) == "ColumnLinear(in_features=16, out_features=15, bias=True)"
    with pytest.raises(IndexError, match="token: ids from 30 to 30, and there are 30 rows"):
        model(torch.full((1, 4), VOCABULARY))
    # Low precision runs, and comes near.
    whole = language("fused")
    expected = whole(token_ids())
    for dtype in (torch.bfloat16, torch.float16):
        low = copy.deepcopy(whole).to(dtype)
        parallelize(low, comm, sequence_parallel=True)
        found = low(token_ids())
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, rtol=0.1, atol=0.1)
        found.float().sum().backward()
    # Layers that read whole inputs or write whole outputs.
    plan = {"blocks.*.mlp.both": "column_gather", "blocks.*.mlp.down": "row_split", "head": "column_gather"}
    compare(language("grouped"), comm, token_ids(), plan=plan)
    # A frozen model: what is not trained has no gradient.
    frozen = language("grouped")
    for name, param in frozen.named_parameters():
        param.requires_grad_("mlp" in name)
    compare(frozen, comm, token_ids())


def test_evaluation_copies_low_precision_and_frozen_layers_of_sharded_models(ranks: Ranks) -> None:
    ranks.run(2, other_uses)


def recomputed(rank: int) -> None:
    comm = tensor_comm()
    for sequence_parallel in (False, True):
        whole = language("fused").double()
        cut = copy.deepcopy(whole)
        parallelize(cut, comm, sequence_parallel=sequence_parallel)
        Full().apply(cut, Hooks())
        whole(token_ids()).square().sum().backward()
        cut(token_ids()).square().sum().backward()
        compare_gradients(whole, cut, comm)


def test_blocks_can_be_recomputed(ranks: Ranks) -> None:
    ranks.run(2, recomputed)


# --- what travels


def collectives(rank: int, sequence_parallel: bool) -> list[tuple[str, str | None, int | None]]:
    comm = tensor_comm()
    model = language("grouped")
    plan = parallelize(model, comm, sequence_parallel=sequence_parallel)
    with recorded() as spans:
        model(token_ids()).sum().backward()
    assert all((span.kind, span.purpose) == ("comm", "tensor-parallel") for span in spans)
    found = [(span.name, span.module, span.bytes) for span in spans]
    planned = [(one.name, one.module, one.bytes) for one in plan.cost(2, 8, 0.0, 1.0).collectives]
    assert sorted(found) == sorted(planned)
    return found


def test_what_travels_is_what_was_planned(ranks: Ranks) -> None:
    found, other = ranks.run(2, collectives, False)
    assert found == other
    layer = 2 * 8 * 16 * 4
    assert [one for one in found if one[1] is not None and one[1].startswith("blocks.0.")] == [
        ("all_reduce", "blocks.0.attention.collect", layer),
        ("all_reduce", "blocks.0.mlp.down", layer),
        ("all_reduce", "blocks.0.mlp.both", layer),
        ("all_reduce", "blocks.0.attention.asks", layer),  # once for queries, keys and values
    ]
    ranks.run(2, collectives, True)


# --- randomness


class Seen:
    """Where dropout let nothing through."""

    def __init__(self, module: nn.Module) -> None:
        self.zeros: list[list[bool]] = []
        module.register_forward_hook(lambda _, __, y: self.zeros.append((y == 0).flatten().tolist()))


def dropped(rank: int, sequence_parallel: bool) -> list[Any]:
    comm = tensor_comm()
    torch.manual_seed(100 + rank)
    same_random_numbers(comm, torch.device("cpu"))
    start = torch.get_rng_state()
    model = language("fused", dropout=0.5).double()
    parallelize(model, comm, sequence_parallel=sequence_parallel)
    model.train()
    # Positive before dropout, so that every zero is one of dropout's.
    nn.init.constant_(model.blocks[0].mlp[0].bias, 100.0)
    nn.init.constant_(model.blocks[0].mlp[3].bias, 100.0)
    inside, outside = Seen(model.blocks[0].mlp[2]), Seen(model.blocks[0].dropout)
    results = []
    for recompute in (False, True):
        undo = Full().apply(model, Hooks()) if recompute else lambda: None
        torch.set_rng_state(start)
        model.zero_grad()
        logits = model(token_ids())
        logits.square().sum().backward()
        undo()
        results.append((logits.detach(), [param.grad for param in model.parameters()], torch.get_rng_state()))
    for once, again in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(once, again)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][2], results[1][2])
    assert not torch.equal(results[0][2], start)
    assert inside.zeros[0] == inside.zeros[1] == inside.zeros[2]  # and recomputed
    attention = model.blocks[0].attention.c_attn.weight.grad
    return [inside.zeros[0], outside.zeros[1], results[0][0].tolist(), attention.tolist()]


def test_dropout_agrees_on_whole_activations_and_differs_on_sharded_ones(ranks: Ranks) -> None:
    first, second = ranks.run(2, dropped, False)
    assert first[0] != second[0]
    assert first[1] == second[1]
    assert first[2] == second[2]
    assert 0.4 < sum(first[0]) / len(first[0]) < 0.6


def test_with_sequence_parallelism_dropout_differs_everywhere(ranks: Ranks) -> None:
    first, second = ranks.run(2, dropped, True)
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert first[2] == second[2]


def attention_dropout(rank: int) -> list[float]:
    comm = tensor_comm()
    torch.manual_seed(3)
    model = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True)
    x = torch.rand(2, 8, 16)
    parallelize(model, comm, example=(x, x, x))
    _, weights = model.train()(x, x, x, average_attn_weights=False)
    again = torch.rand(2)
    both = [weights[:, :2].eq(0), weights[:, 2:].eq(0)]
    assert not torch.equal(*both)
    return [*again.tolist(), *weights.flatten().tolist()]


def test_heads_drop_for_themselves(ranks: Ranks) -> None:
    first, second = ranks.run(2, attention_dropout)
    assert first == second


# --- the head and the loss


def local_logits(rank: int) -> None:
    comm = tensor_comm()
    whole = language("grouped").double()
    cut = copy.deepcopy(whole)
    parallelize(cut, comm, {"head": "column", "*": "auto"})
    logits = cut(token_ids())
    assert logits.shape == (2, 8, 8)
    if rank == 3:  # 30 in four parts of 8: two are padding
        assert logits[0, 0, 6:].tolist() == [-float("inf")] * 2
    targets = token_ids().roll(1)
    vocabulary_cross_entropy(logits, targets, comm, vocabulary=VOCABULARY).backward()
    F.cross_entropy(whole(token_ids()).flatten(0, 1), targets.flatten()).backward()
    compare_gradients(whole, cut, comm)
    if rank == 3:
        assert cut.head.weight.grad is not None
        assert cut.head.weight.grad[6:].abs().max() == 0


def test_logits_of_a_head_may_stay_sharded(ranks: Ranks) -> None:
    ranks.run(4, local_logits)


# --- what goes wrong, goes wrong on all ranks


def refusals(rank: int) -> list[str]:
    comm = tensor_comm()
    model = language("fused")
    before = copy.deepcopy(model.state_dict())
    found = [
        error_of(lambda: parallelize(model, comm, {"blocks.*.mpl.0": "column"})),
        error_of(lambda: parallelize(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 4)), comm)),
        error_of(lambda: parallelize(language("grouped" if rank else "fused"), comm)),
        error_of(lambda: parallelize(model, comm, {"blocks.*.mpl.0": "column"} if rank else None)),
        error_of(lambda: parallelize(model, comm, plan_for(model, 4))),
        error_of(lambda: parallelize(model, comm, plan_for(language("grouped"), 2))),
    ]
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert not [param for param in model.parameters() if shard_of(param)]
    return found


def test_a_plan_that_cannot_be_is_an_error_on_every_rank(ranks: Ranks) -> None:
    first, second = ranks.run(2, refusals)
    assert "the model has no module 'blocks.*.mpl.0'; did you mean 'blocks.0.mlp.0'?" in first[0]
    assert "2 reads 3 features of 0, which cannot be shared out over 2; sizes that work: 3." in first[1]
    assert first[:2] == second[:2]
    assert first[2] == second[2]
    assert "tensor-parallel ranks [1] planned otherwise than rank 0" in first[2]
    assert first[3] == f"tensor-parallel rank 1 could not plan: {second[3]}"
    assert "blocks.*.mpl.0" in second[3]
    assert first[4] == second[4] == "the tensor parallel plan is one for 4 ranks, and there are 2"
    assert first[5].startswith(
        "the tensor parallel plan was made for another model: blocks.0.attention.collect is None"
    )


def other_stages(rank: int) -> str:
    """Of a job of two stages, the second cannot be sharded."""
    comm, everyone = tensor_comm(2), tensor_comm()
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    if rank >= 2:
        model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 4))
    message = error_of(lambda: parallelize(model, comm, everyone=everyone))
    assert model[0].weight.shape[1] == 4
    return message


def test_an_error_on_another_stage_is_one_here(ranks: Ranks) -> None:
    messages = ranks.run(4, other_stages)
    assert messages[0] == messages[1] == f"rank 2 could not plan: {messages[2]}"
    assert "2 reads 3 features of 0" in messages[2]
    assert messages[2] == messages[3]


def pipelines(rank: int) -> list[dict[str, str]]:
    """Layers of one rank are not all called one after the other."""

    def layers() -> list[nn.Module]:
        return [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8)]

    found = []
    for virtual, bounds in ((1, [0, 3, 6]), (2, [0, 1, 4, 5, 6])):
        model = PipelineModule(layers(), num_stages=2, partition_method=bounds, virtual_stages=virtual)
        found.append({role.module: role.style for role in plan_for(model, 2).roles})
    return found


def test_stages_of_a_pipeline_are_planned_one_by_one(ranks: Ranks) -> None:
    first, second = ranks.run(2, pipelines)
    assert first[0] == {"0": "column", "2": "row"}
    assert second[0] == {"4": "column", "5": "row"}
    assert first[1] == {"0": "whole", "4": "whole"}
    assert second[1] == {"2": "whole", "5": "whole"}


def uneven_sequence(rank: int) -> str:
    comm = tensor_comm()
    model = language("fused")
    parallelize(model, comm, sequence_parallel=True)
    return error_of(lambda: model(token_ids()[:, :7]))


def test_a_sequence_that_does_not_divide_is_refused(ranks: Ranks) -> None:
    message = (
        "blocks.0: dimension 1 of an activation of shape (2, 7, 16) is sharded over 2 tensor-parallel ranks, and 7 "
        "does not divide by 2: pad it"
    )
    assert ranks.run(2, uneven_sequence) == [message, message]


# --- the data


def different_data(rank: int) -> list[str]:
    comm = tensor_comm()
    ids = token_ids()
    changed = ids.clone()
    changed[1, 3] += rank == 2
    swapped = ids.clone()
    if rank == 1:
        swapped[0, 0], swapped[0, 1] = 5, 4
    else:
        swapped[0, 0], swapped[0, 1] = 4, 5
    batches: list[Any] = [
        {"ids": ids, "more": [ids.float(), None], "name": "a"},
        (ids, changed),
        swapped,
        ids[: 1 + rank % 2],
        {"ids": ids, "weight": 0.5 + rank},
        ids.float() if rank == 3 else ids,
        torch.full((3,), rank == 0, dtype=torch.bool),
        torch.empty(0),
        torch.tensor([1 + 2j, 1 - 2j * (rank == 3)]).conj(),
        torch.tensor(float(rank == 1), dtype=torch.bfloat16),
    ]
    return [error_of(lambda batch=batch: check_same(batch, comm)) for batch in batches]  # type: ignore[misc]


def test_data_must_match_within_the_group(ranks: Ranks) -> None:
    results = ranks.run(4, different_data)
    for found in results:
        assert found[0] == ""
        assert found[7] == ""
        assert [text.partition(" from ")[0] for text in found if text] == [
            "the data of global rank 2 (tensor-parallel rank 2) differs in its values",
            "the data of global rank 1 (tensor-parallel rank 1) differs in its values",
            "the data of global rank 1 (tensor-parallel rank 1), 3 (tensor-parallel rank 3) differs in its shapes",
            "the data of global rank 1 (tensor-parallel rank 1), 2 (tensor-parallel rank 2), 3 (tensor-parallel rank "
            "3) differs in its shapes",
            "the data of global rank 3 (tensor-parallel rank 3) differs in its shapes",
            "the data of global rank 0 (tensor-parallel rank 0) differs in its values",
            "the data of global rank 3 (tensor-parallel rank 3) differs in its values",
            "the data of global rank 1 (tensor-parallel rank 1) differs in its values",
        ]
    assert results[2][1].endswith("(this rank has 0: int64[2, 8], 1: int64[2, 8])")


def one_rank(rank: int) -> None:
    comm = tensor_comm()
    model = language("fused")
    plan = parallelize(model, comm)
    assert (plan.size, plan.roles) == (1, ())
    assert type(model.head) is nn.Linear
    assert partial_parameters(model) == []
    check_same(token_ids(), comm)
    same_random_numbers(comm, torch.device("cpu"))


def test_one_rank_is_left_alone(ranks: Ranks) -> None:
    ranks.run(1, one_rank)


# --- engines of models that are sharded


def refused_again(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}}
    first, *_ = ds.initialize(model=model, config=config)
    first.destroy()
    before = [param.detach().clone() for param in model.parameters()]
    for size in (1, 2):
        config["tensor_parallel"] = {"autotp_size": size}
        with pytest.raises(ValueError, match=r"initialize: 0\.weight is sharded over tensor-parallel ranks already"):
            ds.initialize(model=model, config=config)
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, value)


def test_a_model_that_is_sharded_already_is_refused_untouched(ranks: Ranks) -> None:
    ranks.run(2, refused_again)


class OfADict(nn.Module):
    """Takes its inputs in a way that cannot be made up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        y: Tensor = self.down(self.up(batch["x"]).relu())
        return y


def cut_by_example(rank: int, example: bool) -> str | tuple[tuple[int, ...], float]:
    config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}}
    batch = {"x": torch.ones(1, 3, 8)}
    try:
        made, *_ = ds.initialize(model=OfADict(), config=config, example=(batch,) if example else None)
    except PlanError as error:
        return str(error)
    return tuple(made.module.up.weight.shape), made(batch).sum().item()


def test_initialize_takes_an_example_of_inputs_that_cannot_be_made_up(ranks: Ranks) -> None:
    for said in ranks.run(2, cut_by_example, False):
        assert "Pass example= (what its forward takes) to initialize or plan_for" in said
    expected = OfADict()({"x": torch.ones(1, 3, 8)}).sum().item()
    for shape, total in ranks.run(2, cut_by_example, True):
        assert shape == (16, 8)
        assert total == pytest.approx(expected, abs=1e-5)
