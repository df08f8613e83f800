"""What the planner makes of models: in one process, without communication."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensor_models import VOCABULARY, Block, FusedAttention, Gated, GroupedAttention, Language, error_of, language
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsprof.engine.tensor import PlanError, TensorPlan, plan_for

torch.set_num_threads(1)


def styles(plan: TensorPlan) -> dict[str, str]:
    return {role.module: role.style for role in plan.roles}


def changes(plan: TensorPlan) -> set[tuple[str, int, int]]:
    return {(c.attribute, c.before, c.after) for c in plan.arrangement.changes}


# --- what is found


def test_the_printed_plan_says_what_is_sharded_and_why() -> None:
    assert (
        str(plan_for(language("fused"), 2))
        == """\
tensor parallel plan over 2 ranks
  token                      vocab          tied to head
  position                   whole          looks up what the model computes
  blocks.*.attention.c_attn  column         read by blocks.*.attention.c_proj, in bands of 16, 16, 16
  blocks.*.attention.c_proj  row            reads blocks.*.attention.c_attn in 4 independent parts
  blocks.*.mlp.0             column         read by blocks.*.mlp.3
  blocks.*.mlp.3             row            reads blocks.*.mlp.0 in 32 independent parts
  head                       column_gather  tied to token
  blocks.*.attention: n_head 4 -> 2, n_embd 16 -> 8, its input reports width 16 as 8"""
    )


def test_a_plan_is_made_without_touching_the_model() -> None:
    model = language("grouped")
    model.train()
    model.blocks[0].mlp.eval()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    attributes = [dict(vars(module)) for module in model.modules()]
    plan_for(model, 4, sequence_parallel=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert [dict(vars(module)) for module in model.modules()] == attributes
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(param.grad is None for param in model.parameters())


def test_weights_are_not_needed() -> None:
    assert styles(plan_for(language("grouped").to("meta"), 2)) == styles(plan_for(language("grouped"), 2))


def test_zeros_hide_no_dependence() -> None:
    """Branches that begin with nothing, as they often do."""

    class Quiet(Block):
        def __init__(self) -> None:
            super().__init__(16, FusedAttention(16, 4), Gated(16, 24))
            self.gain = nn.Parameter(torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.gain * self.attention(self.before(x))
            y: Tensor = x + self.gain * self.mlp(self.between(x))
            return y

    model = Language([Quiet()], 16)
    for param in model.parameters():
        nn.init.zeros_(param)
    found = styles(plan_for(model, 2))
    assert (found["blocks.0.attention.c_attn"], found["blocks.0.mlp.down"]) == ("column", "row")


def test_names_and_order_do_not_matter() -> None:
    found = styles(plan_for(language("grouped"), 2))
    assert {name.rpartition(".")[2]: style for name, style in found.items() if ".attention." in name} == {
        "collect": "row", "values": "column", "lookups": "column", "asks": "column",
    }  # fmt: skip


def test_fewer_key_value_heads_than_ranks_are_copied() -> None:
    plan = plan_for(language("grouped"), 4)
    bands = {role.module: role.bands for role in plan.roles}
    lookups, asks = bands["blocks.0.attention.lookups"], bands["blocks.0.attention.asks"]
    assert lookups is not None
    assert asks is not None
    assert ((lookups.sizes, lookups.copies), (asks.sizes, asks.copies)) == (((8,), 2), ((32,), 1))
    assert changes(plan) == {("heads", 8, 2), ("groups", 2, 1)}


def test_norms_of_queries_get_partial_gradients() -> None:
    plan = plan_for(language("normed"), 2)
    assert plan.partial == tuple(f"blocks.{b}.attention.norm.{n}" for b in (0, 1) for n in ("weight", "bias"))


def test_sequence_parallelism_makes_all_unsharded_parameters_of_the_blocks_partial() -> None:
    plan = plan_for(language("fused"), 2, sequence_parallel=True)
    assert plan.stack is not None
    assert (plan.stack.first, plan.stack.last, plan.stack.dim) == ("blocks.0", "blocks.1", 1)
    assert [name.removeprefix("blocks.0.") for name in plan.partial if name.startswith("blocks.0.")] == [
        "before.weight", "before.bias", "attention.c_proj.bias", "between.weight", "between.bias", "mlp.3.bias",
    ]  # fmt: skip


def test_a_norm_over_all_heads_leaves_the_attention_whole() -> None:
    class Normed(FusedAttention):
        def __init__(self) -> None:
            super().__init__(16, 4)
            self.norm = nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            b, t, c = x.size()
            q, k, v = self.c_attn(x).split(c, dim=2)
            q, k, v = (part.view(b, t, 4, -1).transpose(1, 2) for part in (self.norm(q), k, v))
            y = F.scaled_dot_product_attention(q, k, v)
            out: Tensor = self.c_proj(y.transpose(1, 2).reshape(b, t, c))
            return out

    plan = plan_for(Language([Block(16, Normed(), Gated(16, 24))], 16), 2)
    found = {role.module: (role.style, role.why) for role in plan.roles}
    assert found["blocks.0.attention.c_attn"] == ("whole", "blocks.0.attention.c_proj reads its output whole")
    assert found["blocks.0.mlp.down"][0] == "row"


def test_a_layer_whose_weight_is_used_elsewhere_stays_whole() -> None:
    class Borrowed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.more = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.relu(self.up(x))) + F.linear(x, self.more.weight.t()).sum()
            return y

    plan = plan_for(Borrowed(), 2)
    assert {role.module: role.why for role in plan.roles if role.style == "whole"} == {
        "more": "its weight is used outside its forward"
    }
    message = error_of(lambda: plan_for(Borrowed(), 2, plan={"more": "column_gather"}))
    assert (
        message == "tensor parallel plan: more cannot be sharded: its weight is used outside its forward; write whole"
    )


def test_a_chain_of_layers_is_sharded_in_pairs() -> None:
    """Without a norm in between, every layer could be column or row; the first comes first."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    assert styles(plan_for(model, 2)) == {"0": "column", "2": "row", "4": "whole"}


def test_hidden_features_that_are_returned_are_not_sharded() -> None:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
            self.other = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))

        def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
            hidden = F.gelu(self.up(x))
            return {"all": [self.down(hidden) + self.other(x), hidden]}

    assert styles(plan_for(Leaky(), 2)) == {"up": "whole", "down": "whole", "other.0": "column", "other.1": "row"}


def test_a_subclass_that_adds_to_a_layer_is_sharded_as_the_layer() -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 3

    model = language("fused")
    model.token = Scaled(VOCABULARY, 16)
    model.head.weight = model.token.weight
    assert styles(plan_for(model, 2))["token"] == "vocab"


class Remembers(nn.Module):
    """Counts its calls, and keeps a mask of the first one's length."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.calls = 0
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.mask is None:
            self.mask = torch.ones(x.shape[1], 1)
            self.register_buffer("table", torch.ones(x.shape[1], 1))
        return self.down(self.up(x * self.mask).relu())


def test_planning_leaves_the_state_of_modules_as_it_was() -> None:
    model = Remembers()
    model.down.eval()
    plan_for(model, 2)
    assert (model.calls, model.mask, list(model.buffers())) == (0, None, [])
    assert not hasattr(model, "table")
    assert (model.training, model.up.training, model.down.training) == (True, True, False)
    model(torch.ones(1, 40, 8))


def test_a_model_that_cannot_be_traced_is_traced_in_parts() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
            self.second = nn.ModuleList(Block(8, FusedAttention(8, 2), Gated(8, 8)) for _ in range(2))

        def forward(self, a: dict[str, Tensor]) -> Tensor:
            y: Tensor = self.first(a["left"]) + self.second[0](a["right"])
            return y

    found = styles(plan_for(Two(), 2))
    assert (found["first.0"], found["second.1.mlp.down"]) == ("column", "row")


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_that_recomputes_by_itself_is_sharded(reentrant: bool) -> None:
    class Recomputing(Block):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(super().forward, x, use_reentrant=reentrant)
            return y

    model = Language([Recomputing(16, FusedAttention(16, 4), Gated(16, 24))], 16)
    assert styles(plan_for(model, 2))["blocks.0.mlp.down"] == "row"
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()  # and it still does
    assert model.blocks[0].mlp.down.weight.grad is not None


def test_layers_of_a_bare_list_are_called_in_its_order() -> None:
    model = nn.ModuleList([nn.Embedding(30, 8), Block(8, FusedAttention(8, 2), Gated(8, 8)), nn.Linear(8, 30)])
    found = styles(plan_for(model, 2))
    assert (found["0"], found["1.attention.c_attn"], found["2"]) == ("vocab", "column", "column_gather")


def test_torchs_transformer_is_sharded() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    plan = plan_for(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 2)
    assert set(styles(plan).values()) == {"heads", "column", "row"}
    assert changes(plan) == {("activation_relu_or_gelu", 1, 0)}  # its shortcut would not know of other ranks


def test_an_image_model_is_sharded() -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.img_size = 16
            self.patches = nn.Conv2d(3, 16, 4, 4)
            self.position = nn.Parameter(torch.zeros(1, 16, 16))
            self.block = Block(16, FusedAttention(16, 4), Gated(16, 24))
            self.classes = nn.Linear(16, 10)

        def forward(self, images: Tensor) -> Tensor:
            x = self.patches(images).flatten(2).transpose(1, 2) + self.position
            y: Tensor = self.classes(self.block(x).mean(1))
            return y

    plan = plan_for(Patches(), 2, sequence_parallel=False)
    assert sorted(styles(plan).values()) == ["column", "column", "row", "row", "whole"]


# --- refusals


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanError) as failed:
        plan_for(Language([Block(24, FusedAttention(24, 6), nn.Identity())], 24), 4)
    assert str(failed.value) == (
        "tensor parallelism over 4 ranks: blocks.0.attention.c_proj reads 6 attention heads of "
        "blocks.0.attention.c_attn, which cannot be shared out over 4; sizes that work: 2, 3, 6. Choose one, or leave "
        'it whole with a plan: {"blocks.*.attention": "whole", "*": "auto"}'
    )


def test_key_value_heads_that_do_not_divide_are_refused() -> None:
    attention = GroupedAttention(12, heads=6, groups=3, head=2)
    message = error_of(lambda: plan_for(Language([Block(12, attention, nn.Identity())], 12), 2))
    assert "reads 6 attention heads of blocks.0.attention.{asks, lookups, values}, some of whose keys" in message
    assert "sizes that work: 3, 6." in message


def test_features_that_do_not_divide_are_refused() -> None:
    message = error_of(lambda: plan_for(nn.Sequential(nn.Linear(8, 15), nn.ReLU(), nn.Linear(15, 8)), 2))
    assert "2 reads 15 features of 0, which cannot be shared out over 2; sizes that work: 3, 5, 15." in message


def test_heads_of_torchs_attention_that_do_not_divide_are_refused() -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True)
    message = error_of(lambda: plan_for(layer, 2))
    assert "self_attn has 3 attention heads, which cannot be shared out over 2; sizes that work: 3." in message


def test_code_whose_sharding_cannot_be_derived_is_refused() -> None:
    class Stubborn(FusedAttention):
        def forward(self, x: Tensor) -> Tensor:
            b, t, _ = x.size()
            q, k, v = (part.reshape(b, t, 4, 4).transpose(1, 2) for part in self.c_attn(x).split(16, dim=2))
            y = F.scaled_dot_product_attention(q, k, v)
            out: Tensor = self.c_proj(y.transpose(1, 2).reshape(b, t, 16))
            return out

    model = Language([Block(16, Stubborn(16, 4), Gated(16, 24)) for _ in range(2)], 16)
    message = error_of(lambda: plan_for(model, 2))
    assert message.startswith(
        "tensor parallelism: cannot find out how to shard blocks.0.attention: over 2 ranks it does not compute"
    )
    assert message.endswith('or leave it whole with a plan: {"blocks.*.attention": "whole", "*": "auto"}')
    plan = plan_for(model, 2, plan={"blocks.*.attention": "whole", "*": "auto"})
    assert sorted(styles(plan).values()) == sorted(["vocab", "column_gather", *["whole"] * 5, *["column", "row"] * 2])


def test_sharding_that_would_compute_something_else_is_refused() -> None:
    """Half of each head's features on each rank: the shapes are right, and the scores would not be."""

    class Split(FusedAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, scale=0.5)
            out: Tensor = self.c_proj(y.transpose(1, 2).flatten(2))
            return out

    message = error_of(lambda: plan_for(Language([Block(16, Split(16, 4), nn.Identity())], 16), 2))
    assert "the input of blocks.0.attention.c_proj is not what the whole model computes" in message


class _Counting(torch.autograd.Function):
    """The identity, whose gradient is multiplied by the number of features: of a part, by fewer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * grads[0].shape[-1]


class _PerSample(torch.autograd.Function):
    """The same for the length of a sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * grads[0].shape[1]


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(_Counting.apply(self.up(x)))  # type: ignore[no-untyped-call]
        return y


class Sequenced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(_PerSample.apply(self.norm(x))))  # type: ignore[no-untyped-call]
        return y


def test_a_gradient_that_is_another_one_of_a_part_is_refused() -> None:
    """Forwards are equal."""
    for size in (2, 4):
        message = error_of(lambda: plan_for(nn.Sequential(*(Counted() for _ in range(2))), size))  # noqa: B023
        assert "the gradient of the output of 0.up through the input of 0.down is not what the whole" in message
        assert 'leave it whole with a plan: {"0": "whole", "*": "auto"}' in message


def test_a_gradient_that_is_another_one_of_a_part_of_the_sequence_is_refused() -> None:
    model = Language([Sequenced() for _ in range(2)], 16)
    assert plan_for(model, 2).size == 2
    message = error_of(lambda: plan_for(model, 2, sequence_parallel=True))
    assert "through the input of blocks.0.up is not what the whole model computes" in message
    assert message.endswith("switch sequence_parallel off")


class Middle(nn.Module):
    """Doubles what is neither its first head nor its last."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).unflatten(-1, (-1, 4))
        factors = torch.ones(heads.shape[-2], 1)
        factors[1:-1] = 2
        y: Tensor = self.down((heads * factors).flatten(-2))
        return y


def test_a_rank_in_the_middle_is_tried_too() -> None:
    """Of four ranks with a head each, the first and the last compute the right thing."""
    message = error_of(lambda: plan_for(nn.Sequential(Middle(), Middle()), 4))
    assert "the input of 0.down is not what the whole model computes" in message


def test_a_model_that_cannot_be_traced_takes_an_example() -> None:
    class Secret(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, parcel: dict[str, Tensor]) -> Tensor:
            y: Tensor = self.down(self.up(parcel["x"]))
            return y

    message = error_of(lambda: plan_for(Secret(), 2))
    assert message.startswith(
        "tensor parallelism: cannot find out how to shard up: the model could not be tried on made-up inputs ("
    )
    assert "Pass example=" in message
    plan = plan_for(Secret(), 2, example=({"x": torch.ones(2, 4, 8)},))
    assert styles(plan) == {"up": "column", "down": "row"}
    assert "does not take the example: " in error_of(lambda: plan_for(Secret(), 2, example=({"y": 0},)))


def test_a_model_with_nothing_to_shard_is_refused() -> None:
    message = error_of(lambda: plan_for(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), 2))
    assert "found nothing to shard (0: 2 reads its output whole; 2: writes the output)" in message


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"blocks.*.attn.c_attn": "column"}, "the model has no module 'blocks.*.attn.c_attn'; did you mean 'blocks."),
        ({"blocks.*.attention": "column"}, "'blocks.0.attention' is 'column', and a FusedAttention is no linear layer"),
        ({"head": "colwize"}, "'head' is 'colwize', which is no style; there are column, "),
        ({"head": "moe_tp_experts"}, "'head' is 'moe_tp_experts', which is no style"),
        ({"blocks.*.mlp.0": "column"}, "blocks.0.mlp.0 is column, but blocks.0.mlp.3 reads its output whole"),
        ({"blocks.*.mlp.3": "row"}, "blocks.0.mlp.3 is row, but blocks.0.mlp.0 would have to be column"),
        ({"blocks.*.mlp.0": "row"}, "blocks.0.mlp.0 is row, but its input depends on"),
        ({"blocks.*.mlp.0": "vocab"}, "blocks.0.mlp.0 is vocab, which is not for a linear layer"),
        ({"position": "column"}, "position is column, which is not for an embedding"),
        ("automatic", "'automatic' is none; write \"derive\""),
    ],
)
def test_plans_that_cannot_be_carried_out_are_refused(plan: dict[str, str] | str, said: str) -> None:
    with pytest.raises(PlanError) as failed:
        plan_for(language("fused"), 2, plan=plan)
    assert said in str(failed.value)


def test_zero_ranks_are_refused() -> None:
    assert "write 1 or more" in error_of(lambda: plan_for(language(), 0))
    assert str(plan_for(language(), 1)) == "tensor parallel plan over 1 ranks: nothing is sharded"


def test_sequences_that_cannot_be_sharded_are_refused() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(self.up(x))
            return y

    message = error_of(lambda: plan_for(Flat(), 2, sequence_parallel=True))
    assert message.startswith("sequence_parallel: the model has no ModuleList or Sequential of blocks")
    plan = {"blocks.*.mlp.0": "column_gather", "blocks.*.mlp.3": "row_split", "*": "auto"}
    message = error_of(lambda: plan_for(language("fused"), 2, plan=plan, sequence_parallel=True))
    assert message.startswith("sequence_parallel: blocks.0.mlp.0 is column_gather, which needs the whole sequence")


# --- explicit plans


def test_an_explicit_plan_may_use_hugging_faces_words() -> None:
    plan = plan_for(
        language("grouped"),
        2,
        plan={
            "token": "embedding_rowwise",
            "blocks.*.mlp.both": "packed_colwise",
            "blocks.*.mlp.down": "rowwise",
            "blocks.*.attention.asks": "colwise_gather_output",
            "blocks.0.attention.collect": "rowwise_split_input",
        },
    )
    found = styles(plan)
    assert found["token"] == "vocab"
    assert (found["blocks.1.mlp.both"], found["blocks.1.mlp.down"]) == ("column", "row")
    assert (found["blocks.1.attention.asks"], found["blocks.0.attention.collect"]) == ("column_gather", "row_split")
    assert (found["blocks.1.attention.collect"], found["head"]) == ("whole", "whole")


def test_weights_tied_to_a_sharded_layer_are_sharded_with_it() -> None:
    assert styles(plan_for(language("fused"), 2, plan={"head": "column_gather"}))["token"] == "vocab"
    assert styles(plan_for(language("fused"), 2, plan={"token": "vocab"}))["head"] == "column_gather"


def test_the_plan_that_a_model_brings_is_taken() -> None:
    model = language("grouped")
    model._tp_plan = {"blocks.*.attention.asks": "colwise_gather_output", "blocks.*.mlp.experts": "grouped_gemm"}  # type: ignore[assignment]
    found = {role.module: (role.style, role.why) for role in plan_for(model, 2).roles}
    assert found["blocks.0.attention.asks"] == ("column_gather", "as planned")
    assert found["blocks.0.mlp.down"][0] == "row"
    assert styles(plan_for(model, 2, plan="derive"))["blocks.0.attention.asks"] == "column"


# --- what it costs


def test_a_layer_has_four_collectives() -> None:
    """Two all-reduces forward and two backward, of batch x sequence x width each."""
    cost = plan_for(language("fused"), 4).cost(2, 8, alpha_s=1e-5, beta_bytes_per_s=1e9)
    layer = 2 * 8 * 16 * 4
    assert [(one.module, one.name, one.when, one.bytes) for one in cost.per_layer] == [
        ("blocks.0.attention.c_attn", "all_reduce", "backward", layer),
        ("blocks.0.attention.c_proj", "all_reduce", "forward", layer),
        ("blocks.0.mlp.0", "all_reduce", "backward", layer),
        ("blocks.0.mlp.3", "all_reduce", "forward", layer),
    ]
    assert cost.layers == 2
    assert cost.per_layer[0].seconds == pytest.approx(2 * 3 * 1e-5 + 2 * 3 / 4 * layer / 1e9, rel=1e-12)
    logits = 2 * 8 * VOCABULARY * 4
    assert cost.bytes == 8 * layer + layer + layer + logits  # and the embedding, and the head's input and output
    assert cost.seconds == pytest.approx(10 * cost.per_layer[0].seconds + 3 * 1e-5 + 3 / 4 * logits / 1e9, rel=1e-12)
    assert str(cost).startswith("4 collectives a layer x 2, 11 in all: 0.0122 MB, ")


def test_queries_keys_and_values_share_one_collective() -> None:
    cost = plan_for(language("grouped"), 2).cost(1, 8, 0.0, 1e9)
    assert [one.module for one in cost.per_layer if one.when == "backward"] == [
        "blocks.0.attention.asks", "blocks.0.mlp.both",
    ]  # fmt: skip


def test_sequence_parallelism_sends_as_much() -> None:
    plain, cut = (plan_for(language("fused"), 2, sequence_parallel=on).cost(1, 8, 0.0, 1e9) for on in (False, True))
    assert [one.name for one in cut.per_layer].count("all_gather") == 4
    assert sum(one.seconds for one in cut.per_layer[:8]) == pytest.approx(sum(one.seconds for one in plain.per_layer))


def test_costs_of_impossible_numbers_are_refused() -> None:
    plan = plan_for(language("fused"), 2)
    for given, says in (
        ((0, 8, 0.0, 1e9), "batch is 0; write 1 or more"),
        ((1, 0, 0.0, 1e9), "sequence is 0"),
        ((1, 8, -1.0, 1e9), "alpha_s is -1.0"),
        ((1, 8, 0.0, 0.0), "beta_bytes_per_s is 0.0; write more than 0"),
    ):
        with pytest.raises(ValueError, match=f"TensorPlan.cost: {says}"):
            plan.cost(*given)
