"""The planner on models of many kinds: parameters that are sharded with what they are applied to, adapters, layers that
compute by themselves, decisions in Python, images and signals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from tensor_models import Block, FusedAttention, Gated, compare_gradients, error_of, tensor_comm
from torch import Tensor, nn

from dsprof.engine.tensor import TensorPlan, parallelize, plan_for, shard_of

torch.set_num_threads(1)


def styles(plan: TensorPlan) -> dict[str, str]:
    return {role.module: role.style for role in plan.roles}


# --- what is sharded with what it is applied to


def batch_norms() -> nn.Module:
    """Between the layers that are sharded: statistics, a gain for each feature, groups of features."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8),
        nn.Linear(8, 12), nn.BatchNorm1d(12, momentum=None), nn.GroupNorm(4, 12), nn.ReLU(), nn.Linear(12, 8),
    )  # fmt: skip


class Sinks(nn.Module):
    """Attention with a number for each head, and one for each feature of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.heads = 4
        self.sinks = nn.Parameter(torch.rand(4))
        self.gain = nn.Parameter(torch.rand(4, 4))
        self.table = nn.Parameter(torch.rand(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, 4).permute(2, 0, 3, 1, 4)
        scores = q * self.gain.view(1, -1, 1, 4) @ k.transpose(-2, -1) + self.table[:t].t().view(1, -1, 1, t)
        scores = torch.cat([scores, self.sinks.view(1, -1, 1, 1).expand(b, -1, t, 1)], -1)
        y: Tensor = self.out((scores.softmax(-1)[..., :-1] @ v).transpose(1, 2).flatten(2))
        return y


def test_parameters_of_sharded_features_are_sharded_with_them() -> None:
    plan = plan_for(nn.Sequential(Sinks(), nn.LayerNorm(16)), 2)
    assert {name: (share.dim, share.bands.sizes) for name, share in plan.arrangement.shares} == {
        "0.sinks": (0, (4,)), "0.gain": (0, (4,)), "0.table": (1, (4,)),
    }  # fmt: skip
    assert "  sharded with what they are applied to: 0.sinks, 0.gain, 0.table" in str(plan)
    assert plan.partial == ()


def cut_norms_and_sinks(rank: int) -> None:
    comm = tensor_comm()
    x = torch.rand(6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = batch_norms().double()
    cut = copy.deepcopy(whole)
    plan = parallelize(cut, comm)
    assert sorted(styles(plan).values()) == ["column", "column", "row", "row"]
    for training in (True, True, False):  # twice, for statistics that have been sharded before
        whole.train(training)
        cut.train(training)
        whole.zero_grad()
        cut.zero_grad()
        expected, found = whole(x), cut(x)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        expected.square().sum().backward()
        found.square().sum().backward()
        compare_gradients(whole, cut, comm)
        for (name, one), (_, other) in zip(whole.named_buffers(), cut.named_buffers(), strict=True):
            torch.testing.assert_close(other, one, msg=name)
    torch.manual_seed(2)
    whole = nn.Sequential(Sinks(), nn.LayerNorm(16)).double()
    cut = copy.deepcopy(whole)
    parallelize(cut, comm)
    assert isinstance(cut[0], Sinks)
    assert tuple(cut[0].table.shape) == (8, 2)
    assert shard_of(cut[0].table) is not None
    x = torch.rand(2, 8, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (whole(x) ** 2).sum().backward()
    (cut(x) ** 2).sum().backward()
    compare_gradients(whole, cut, comm)


def test_batch_norms_and_parameters_of_heads_compute_the_same(ranks: Ranks) -> None:
    ranks.run(2, cut_norms_and_sinks)


class Scaled(nn.Module):
    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("gain", torch.arange(1.0, 17), persistent=persistent)
        self.rest = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rest(F.layer_norm(self.down(F.silu(self.up(x)) * self.gain), [8]))
        return y


def test_a_buffer_is_sharded_unless_it_is_saved() -> None:
    assert styles(plan_for(Scaled(False), 2))["down"] == "row"
    found = styles(plan_for(Scaled(True), 2))
    assert (found["up"], found["down"], found["rest.2"]) == ("whole", "whole", "row")


def test_a_batch_norm_does_not_see_a_part_of_the_sequence() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16)
            self.mlp = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(self.norm(x.transpose(1, 2)).transpose(1, 2))

    model = nn.Sequential(nn.Embedding(30, 16), Normed(), Normed())
    assert styles(plan_for(model, 2))["1.mlp.0"] == "column"
    message = error_of(lambda: plan_for(model, 2, sequence_parallel=True))
    assert message.startswith("sequence_parallel: 1.norm is a batch norm between 1 and 2")


# --- decisions in Python


class Deciding(nn.Module):
    """Between the layers that are sharded, or beside them, code goes one way or another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "whole" and x.mean() > -1:
            x = x * 2
        h = self.up(x)
        if self.how == "bool" and h.sum() > 0:
            h = h * 2
        if self.how == "item" and h.max().item() > 0:
            h = h * 2
        if self.how == "list" and max(h.flatten().tolist()) > 0:
            h = h * 2
        if self.how == "written":
            kept = torch.zeros_like(h)
            kept[..., :4] = h[..., :4]
            h = h * 2 if kept.sum() > -1 else h
        if self.how == "check" and not torch.isfinite(h).all():
            h = h.clamp(-1, 1)
        y = self.down(torch.relu(h))
        if self.how == "after" and bool((y > 0).any()):
            y = y * 2
        return x + y


def deciding(how: str) -> nn.Module:
    return nn.Sequential(nn.Embedding(30, 16), Deciding(how), Deciding(how), nn.Linear(16, 30))


@pytest.mark.parametrize(("how", "read"), [("bool", "bool"), ("item", "item"), ("list", "tolist"), ("written", "bool")])
def test_control_flow_on_sharded_activations_is_refused(how: str, read: str) -> None:
    """All the ranks would go the same way in a rehearsal, and not on other data."""
    message = error_of(lambda: plan_for(deciding(how), 2))
    assert f"1.up is followed by {read}() of an activation, of which each rank has a part" in message
    assert message.endswith('or leave it whole with a plan: {"1": "whole", "*": "auto"}')
    plan = plan_for(deciding(how), 2, plan={"1": "whole", "2": "whole", "*": "auto"})
    assert styles(plan)["1.up"] == "whole"


def test_control_flow_on_whole_activations_is_allowed() -> None:
    for how in ("whole", "check", "after"):
        assert styles(plan_for(deciding(how), 2))["1.down"] == "row"
    for how in ("whole", "after"):  # each rank has a part of the sequence
        message = error_of(lambda how=how: plan_for(deciding(how), 2, sequence_parallel=True))  # type: ignore[misc]
        assert "is followed by bool() of an activation" in message
        assert "or switch sequence_parallel off" in message


def test_errors_of_sequence_parallelism_name_it() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.over = nn.GRU(16, 16, batch_first=True)
            self.mlp = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x + self.mlp(self.over(x)[0])
            return y

    model = nn.Sequential(nn.Embedding(30, 16), Recurrent(), Recurrent())
    assert styles(plan_for(model, 2))["1.mlp.2"] == "row"
    message = error_of(lambda: plan_for(model, 2, sequence_parallel=True))
    assert message.endswith("the input of 1.mlp.0 is not what the whole model computes; switch sequence_parallel off")


# --- layers


class Adapted(nn.Module):
    """A layer that is frozen, and an adapter of low rank beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.low, self.high = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.high(self.low(x))
        return y


@pytest.mark.parametrize("rank", [4, 3])  # of which the second does not divide
def test_adapters_do_not_keep_their_layers_whole(rank: int) -> None:
    plan = plan_for(nn.Sequential(Adapted(8, 32, rank), nn.ReLU(), Adapted(32, 8, rank)), 2)
    assert styles(plan) == {
        "0.base": "column", "0.low": "whole", "0.high": "column", "2.base": "row", "2.low": "row", "2.high": "whole",
    }  # fmt: skip


class Casting(nn.Linear):
    """Computes what nn.Linear does, without it."""

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.to(x.dtype).t()
        return y if self.bias is None else y + self.bias


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * (x @ self.weight.t())


def casting_layers(rank: int) -> None:
    comm = tensor_comm()
    torch.manual_seed(1)
    whole = nn.Sequential(Casting(8, 16), nn.ReLU(), Casting(16, 8, bias=False)).double()
    cut = copy.deepcopy(whole)
    assert set(styles(parallelize(cut, comm)).values()) == {"column", "row"}
    x = torch.rand(3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(cut(x), whole(x), rtol=1e-10, atol=1e-10)
    assert isinstance(cut[0], Casting)


def test_a_subclass_that_computes_a_linear_layer_itself_is_sharded(ranks: Ranks) -> None:
    ranks.run(2, casting_layers)
    message = error_of(lambda: plan_for(nn.Sequential(Doubling(8, 16), nn.ReLU(), Doubling(16, 8)), 2))
    assert "0: its weight is used outside its forward" in message


def test_the_advice_names_a_layer_where_the_model_is_all_there_is() -> None:
    message = error_of(lambda: plan_for(nn.Sequential(nn.Linear(8, 16), nn.PReLU(16), nn.Linear(16, 8)), 2))
    assert message.startswith(
        "tensor parallelism: cannot find out how to shard 2: over 2 ranks it does not compute what it"
    )
    assert message.endswith(
        "Have it take its sizes from the outputs of its layers, or leave it whole with a plan: "
        '{"2": "whole", "*": "auto"}'
    )


def test_groups_in_a_fused_projection_of_grouped_queries() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads, self.groups = 8, 4
            self.qkv, self.out = nn.Linear(32, 4 * 4 * 4), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            b, t, _ = x.shape
            qkv = self.qkv(x).view(b, t, self.groups, self.heads // self.groups + 2, 4)
            q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in qkv.split([self.heads // self.groups, 1, 1], 3))
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            out: Tensor = self.out(y.transpose(1, 2).flatten(2))
            return out

    plan = plan_for(nn.Sequential(Grouped(), nn.LayerNorm(32)), 2)
    assert {(c.attribute, c.before, c.after) for c in plan.arrangement.changes} == {("heads", 8, 4), ("groups", 4, 2)}


def test_what_is_whole_for_being_no_layer_is_said() -> None:
    model = nn.Sequential(nn.Embedding(30, 8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
    model.append(nn.GRU(8, 8))
    assert "  whole, for they are no layers that can be sharded: 2 (GRU)" in str(plan_for(model, 2))


# --- trying


def test_planning_compiles_nothing() -> None:
    compiled = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model.compile(backend=backend)
    whole = nn.Sequential(torch.compile(Gated(8, 8), backend=backend), nn.LayerNorm(8))
    plan_for(nn.Sequential(model, nn.LayerNorm(8)), 2)
    plan_for(whole, 2)
    assert compiled == []
    whole(torch.ones(1, 2, 8))
    assert len(compiled) == 1  # and afterwards it is


def test_hooks_that_a_forward_installs_are_taken_away_again() -> None:
    class Recording(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
            self.hooked = False
            self.seen: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            if not self.hooked:
                self.mlp.register_forward_hook(lambda *_: self.seen.append(1))
                self.hooked = True
            return x + self.mlp(x)

    model = Recording()
    plan_for(model, 2)
    model(torch.ones(1, 8))
    assert model.seen == [1]


def test_a_model_that_returns_less_in_training_is_sharded() -> None:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = self.mlp(x)
            return (y,) if self.training else (y, x)

    plan = plan_for(Memory(), 2)
    assert (styles(plan)["mlp.3"], plan.random_regions) == ("row", (0,))


def test_an_image_whose_size_only_the_table_of_positions_tells() -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 16, 8, 8)
            self.first = nn.Parameter(torch.zeros(1, 1, 16))
            self.position = nn.Parameter(torch.zeros(1, 26, 16))  # 5 x 5, and a class token
            self.block = Block(16, FusedAttention(16, 4), Gated(16, 24))

        def forward(self, images: Tensor) -> Tensor:
            x = self.patches(images).flatten(2).transpose(1, 2)
            x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.position
            y: Tensor = self.block(x)
            return y

    assert sorted(styles(plan_for(Patches(), 2)).values()) == ["column", "column", "row", "row"]


def test_a_signal_whose_length_only_the_table_of_positions_tells() -> None:
    class Sound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Sequential(nn.Conv1d(5, 16, 3, padding=1), nn.GELU(), nn.Conv1d(16, 16, 3, 2, 1))
            self.position = nn.Embedding(24, 16)
            self.block = Block(16, FusedAttention(16, 4), Gated(16, 24))

        def forward(self, signal: Tensor) -> Tensor:
            x = self.conv(signal).transpose(1, 2)
            y: Tensor = self.block(x + self.position.weight)  # of one length only
            return y

    found = styles(plan_for(Sound(), 2))
    assert (found["block.attention.c_attn"], found["block.mlp.down"]) == ("column", "row")
