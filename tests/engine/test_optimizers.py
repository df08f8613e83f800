"""Optimizers: each against its formula or torch's own, and pieces on several ranks against the whole on one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks, everyone
from spans import recorded
from torch import Tensor, nn
from torch.optim import Optimizer

from dsprof.engine import optim
from dsprof.engine.optim.muon import iterations, orthogonalize, owners
from dsprof.engine.optim.tiled import Shards, whole

SHAPES = [(6, 4), (3, 7), (5,), (), (2, 3, 2), (1,)]
"""Of a small model: pieces of them have different lengths, and some are empty."""


def weights(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def gradients(step: int) -> list[Tensor | None]:
    """Of one step; in the second, one parameter has none."""
    grads: list[Tensor | None] = list(weights(100 + step))
    if step == 1:
        grads[2] = None
    return grads


def masters_of(values: list[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(value.clone()) for value in values]


def train(optimizer: Optimizer, masters: list[nn.Parameter], steps: int, cut: Callable[[Tensor], Tensor]) -> None:
    for step in range(steps):
        for master, grad in zip(masters, gradients(step), strict=True):
            master.grad = None if grad is None else cut(grad)
        optimizer.step()


def two_groups(masters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": masters[:3], "weight_decay": 0.1}, {"params": masters[3:], "lr": 0.02}]


def single(make: Callable[[list[nn.Parameter]], Optimizer], steps: int = 4) -> list[Tensor]:
    masters = masters_of(weights())
    train(make(masters), masters, steps, lambda grad: grad)
    return [master.detach() for master in masters]


def bounds(numel: int, ranks: int) -> tuple[tuple[int, int], ...]:
    chunk = -(-numel // ranks)
    return tuple((min(rank * chunk, numel), min((rank + 1) * chunk, numel)) for rank in range(ranks))


# --- one optimizer at a time, whole parameters


@pytest.mark.parametrize(
    ("type", "params", "same"),
    [
        ("Adam", {"lr": 0.01, "weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
        ("Adam", {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False},
         lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1)),
        ("AdamW", {"betas": [0.8, 0.9]}, lambda p: torch.optim.AdamW(p, betas=(0.8, 0.9), weight_decay=0)),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ("RMSprop", {"lr": 0.1}, lambda p: torch.optim.RMSprop(p, lr=0.1)),
    ],
)  # fmt: skip
def test_torchs_optimizers(type: str, params: dict[str, Any], same: Callable[[Any], Optimizer]) -> None:
    ours = single(lambda masters: optim.build(type, params, masters))
    for mine, theirs in zip(ours, single(same), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_adam_is_fused_where_torch_can() -> None:
    param = nn.Parameter(torch.zeros(2))
    for type in ("Adam", "AdamW", "SGD"):
        assert optim.build(type, {}, [param]).param_groups[0]["fused"] is True
    assert optim.build("Adam", {"foreach": True}, [param]).param_groups[0]["fused"] is None
    assert optim.build("Adam", {}, [nn.Parameter(torch.zeros(2, device="meta"))]).param_groups[0]["fused"] is False


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}])
def test_adam_without_bias_correction(options: dict[str, Any]) -> None:
    param = nn.Parameter(torch.tensor([1.0]))
    optimizer = optim.build("Adam", {"lr": 0.1, "bias_correction": False, "betas": (0.5, 0.75), **options}, [param])
    # m = 1, 1.5 and v = 1, 1.75 for two gradients of 2
    expected = 1.0
    for first, second in ((1.0, 1.0), (1.5, 1.75)):
        param.grad = torch.tensor([2.0])
        optimizer.step()
        expected -= 0.1 * first / (math.sqrt(second) + 1e-8)
        assert param.item() == pytest.approx(expected, rel=1e-6)
    again = optim.build("Adam", {"lr": 0.1, "bias_correction": False, "betas": (0.5, 0.75), **options}, [param])
    again.load_state_dict(optimizer.state_dict())
    param.grad = torch.tensor([2.0])
    again.step()
    assert param.item() == pytest.approx(expected - 0.1 * 1.75 / (math.sqrt(2.3125) + 1e-8), rel=1e-6)


def test_lion_by_hand() -> None:
    param = nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = optim.build("Lion", {"lr": 0.1, "betas": (0.5, 0.75), "weight_decay": 0.5}, [param])
    param.grad = torch.tensor([4.0, -4.0])
    optimizer.step()  # m = 1, -1
    assert param.tolist() == pytest.approx([0.95 - 0.1, 0.95 + 0.1])
    param.grad = torch.tensor([-0.5, 0.0])
    optimizer.step()  # 0.5 * (1, -1) + 0.5 * (-0.5, 0) is positive, negative
    assert param.tolist() == pytest.approx([0.85 * 0.95 - 0.1, 1.05 * 0.95 + 0.1])


def lamb_by_hand(lr: float, low: float, high: float) -> list[float]:
    p, m, v = torch.tensor([3.0, 4.0]), torch.zeros(2), torch.zeros(2)
    for t, g in ((1, torch.tensor([1.0, -2.0])), (2, torch.tensor([0.5, 1.0]))):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        u = m / (v.sqrt() + 1e-6) + 0.1 * p
        coefficient = min(max((p.norm() / u.norm()).item(), low), high)
        p = p - lr * math.sqrt(1 - 0.99**t) / (1 - 0.9**t) * coefficient * u
    return p.tolist()


@pytest.mark.parametrize(("low", "high"), [(0.01, 10.0), (0.01, 2.0), (6.0, 10.0)])
def test_lamb_by_hand(low: float, high: float) -> None:
    param = nn.Parameter(torch.tensor([3.0, 4.0]))
    options = {"lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-6, "weight_decay": 0.1, "min_coeff": low, "max_coeff": high}
    optimizer = optim.build("Lamb", options, [param])
    for grad in ([1.0, -2.0], [0.5, 1.0]):
        param.grad = torch.tensor(grad)
        optimizer.step()
    assert param.tolist() == pytest.approx(lamb_by_hand(0.1, low, high), rel=1e-5)


def test_lamb_takes_adams_step_where_a_weight_is_zero() -> None:
    param = nn.Parameter(torch.zeros(2))
    optimizer = optim.build("Lamb", {"lr": 0.1, "bias_correction": False, "eps": 0.0}, [param])
    param.grad = torch.tensor([2.0, -2.0])
    optimizer.step()  # m / sqrt(v) = 0.1 * 2 / sqrt(0.001 * 4)
    assert param.tolist() == pytest.approx([-0.1 * 0.2 / math.sqrt(0.004), 0.1 * 0.2 / math.sqrt(0.004)])
    inside = nn.Parameter(torch.zeros(1))
    options = {"lr": 0.1, "bias_correction": False, "eps": 0.06, "eps_inside_sqrt": True}
    optimizer = optim.build("Lamb", options, [inside])
    inside.grad = torch.tensor([2.0])
    optimizer.step()
    assert inside.item() == pytest.approx(-0.1 * 0.2 / math.sqrt(0.064))


def test_muon_is_torchs_for_matrices_and_adamw_for_the_rest() -> None:
    ours, theirs = masters_of(weights()), masters_of(weights())
    shards = {master: whole(master, muon=master.ndim == 2) for master in ours}
    options = {"muon_lr": 0.05, "adam_lr": 0.01, "weight_decay": 0.1, "momentum": 0.9}
    optimizer = optim.build("Muon", options, ours, shards=shards)
    matrices = torch.optim.Muon(theirs[:2], lr=0.05, weight_decay=0.1, momentum=0.9)
    rest = torch.optim.AdamW(theirs[2:], lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-10)
    for _ in range(2):
        train(optimizer, ours, 3, lambda grad: grad)
        for step in range(3):
            for master, grad in zip(theirs, gradients(step), strict=True):
                master.grad = grad
            matrices.step()
            rest.step()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
        again = optim.build("Muon", options, ours, shards=shards)
        again.load_state_dict(optimizer.state_dict())
        optimizer = again
        for group in (*optimizer.param_groups, *matrices.param_groups, *rest.param_groups):
            group["lr"] /= 2


def test_muon_treats_filters_as_rows() -> None:
    filters = torch.randn(4, 3, 2)
    (flat,) = orthogonalize([filters.flatten().bfloat16()], [whole(filters)], iterations())
    singular = torch.linalg.svdvals(flat.float().view(4, 6))
    assert singular.min() > 0.5
    assert singular.max() < 1.3


def test_muon_rates() -> None:
    masters = masters_of(weights())[:3]
    shards = {master: whole(master, muon=master.ndim == 2) for master in masters}

    def rates(**params: Any) -> list[tuple[bool, float]]:
        built = optim.build("Muon", params, masters, shards=shards)
        return [(group["use_muon"], group["lr"]) for group in built.param_groups]

    assert rates() == [(True, 0.02), (False, 3e-4)]
    assert rates(lr=0.1, muon_lr=None) == [(True, 0.1), (False, 0.1)]
    assert rates(lr=0.1, adam_lr=0.2) == [(True, 0.1), (False, 0.2)]
    own = optim.build("Muon", {"lr": 0.1}, [{"params": masters, "lr": 0.7}], shards=shards)
    assert [group["lr"] for group in own.param_groups] == [0.7, 0.7]


def test_wants_muon() -> None:
    matrix, vector = torch.zeros(2, 2), torch.zeros(2)
    assert optim.wants_muon("blocks.0.mlp.weight", matrix)
    assert not optim.wants_muon("blocks.0.mlp.bias", vector)
    assert not optim.wants_muon("token_embedding.weight", matrix)
    assert not optim.wants_muon("lm_head.weight", matrix)
    chosen = nn.Parameter(matrix)
    chosen.use_muon = True  # type: ignore[attr-defined]
    assert optim.wants_muon("lm_head.weight", chosen)


def test_owners_share_the_work() -> None:
    # Costs: 8 * 8 * 8 = 512, 4 * 4 * 4 = 64, 4 * 16 * 4 = 256, 2 * 64 * 2 = 256.
    assert owners([(8, 8), (4, 4), (4, 16), (2, 64)], 2) == [[0, 1], [2, 3]]
    assert owners([(2, 2)], 3) == [[0], [], []]


@pytest.mark.parametrize("type", ["AdamW", "Lion", "Lamb", "Muon"])
def test_stepping_in_tiles_is_stepping_at_once(type: str) -> None:
    def trained(tiles: list[list[int]]) -> list[Tensor]:
        masters = masters_of(weights())
        shards = {master: whole(master, muon=master.ndim >= 2) for master in masters}
        optimizer = optim.build(type, {"lr": 0.01}, two_groups(masters), shards=shards)
        for step in range(3):
            for tile in tiles:
                for at, grad in enumerate(gradients(step)):
                    masters[at].grad = grad if at in tile else None
                optimizer.step()
        return [master.detach() for master in masters]

    for mine, other in zip(trained([[0, 3], [1, 2], [4], [5]]), trained([[0, 1, 2, 3, 4, 5]]), strict=True):
        assert torch.equal(mine, other)


def test_muon_must_know_which_masters_are_hidden_matrices() -> None:
    with pytest.raises(ValueError, match="give `shards` for all of them"):
        optim.build("Muon", {}, [nn.Parameter(torch.zeros(2, 2))])


# --- pieces on several ranks


def train_pieces(rank: int, ranks: int, type: str, params: dict[str, Any]) -> tuple[list[Tensor], list[Any]]:
    """What the pieces are after four steps, of the whole parameters' initial values, and what was told of the last."""
    cuts = [bounds(value.numel(), ranks) for value in weights()]
    masters = [nn.Parameter(value.flatten()[slice(*cut[rank])]) for value, cut in zip(weights(), cuts, strict=True)]
    shards: Shards = {
        master: optim.Shard(torch.Size(shape), cut, everyone(), muon=len(shape) >= 2)
        for master, shape, cut in zip(masters, SHAPES, cuts, strict=True)
    }
    optimizer = optim.build(type, params, two_groups(masters), shards=shards)
    for step in range(4):
        for master, grad, cut in zip(masters, gradients(step), cuts, strict=True):
            master.grad = None if grad is None else grad.flatten()[slice(*cut[rank])]
        with recorded() as spans:
            optimizer.step()
    told = [(span.kind, span.name, span.purpose, span.bytes, span.dtype) for span in spans]
    return [master.detach() for master in masters], told


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("type", "told"),
    [
        ("AdamW", []),
        ("Lion", []),
        # two norms of six parameters
        ("Lamb", [("comm", "all_reduce", "optimizer", 2 * 6 * 8, "float64")]),
        ("Muon", ["comm all_to_all", "comm all_to_all"]),
    ],
)
def test_pieces_give_what_the_whole_gives(ranks: Ranks, size: int, type: str, told: list[Any]) -> None:
    params = {"lr": 0.01, "weight_decay": 0.05}

    def make(masters: list[nn.Parameter]) -> Optimizer:
        shards = {master: whole(master, muon=master.ndim >= 2) for master in masters}
        return optim.build(type, params, two_groups(masters), shards=shards)

    expected = single(make)
    results = ranks.run(size, train_pieces, size, type, params)
    for at, value in enumerate(expected):
        together = torch.cat([pieces[at] for pieces, _ in results])
        torch.testing.assert_close(together, value.flatten(), rtol=0, atol=1e-6)
    for _, seen in results:
        if type == "Muon":
            assert [f"{kind} {name}" for kind, name, *_ in seen] == told
        else:
            assert seen == told


def test_muon_sends_each_piece_once_and_back(ranks: Ranks) -> None:
    (_, first), (_, second) = ranks.run(2, train_pieces, 2, "Muon", {})
    # Matrices 6 x 4, 3 x 7 and 2 x 3 x 2, of cost 96, 63 and 24: rank 0 owns the first, rank 1 the others. It gets
    # 10 + 6 and 11 + 6 elements of 2 bytes and sends its own pieces of 12 + 10 + 6; rank 0 sends 12 + 11 + 6, gets 24.
    assert [bytes for *_, bytes, _ in first] == [2 * 29, 2 * 29]
    assert [bytes for *_, bytes, _ in second] == [2 * 33, 2 * 33]


# --- a client's optimizer


def partitioned(params: list[nn.Parameter], rank: int) -> tuple[dict[nn.Parameter, nn.Parameter], Shards]:
    """Masters of one of two ranks; the ranks stand for themselves, nothing is communicated."""
    replace: dict[nn.Parameter, nn.Parameter] = {}
    shards: dict[Tensor, optim.Shard] = {}
    for param in params:
        cut = bounds(param.numel(), 2)
        master = nn.Parameter(param.detach().flatten()[slice(*cut[rank])].float())
        replace[param] = master
        shards[master] = optim.Shard(param.shape, cut, everyone())
    return replace, shards


def test_adopt_keeps_groups_and_options() -> None:
    first, second, frozen = (nn.Parameter(torch.randn(4), requires_grad=wanted) for wanted in (True, True, False))
    optimizer = torch.optim.AdamW([{"params": [frozen, first], "lr": 0.5}, {"params": [second]}], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    replace = {first: nn.Parameter(torch.zeros(2)), second: nn.Parameter(torch.zeros(3))}
    optim.adopt(optimizer, replace)
    assert [group["params"] for group in optimizer.param_groups] == [[replace[first]], [replace[second]]]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    replace[second].grad = torch.ones(3)
    optimizer.step()
    schedule.step()
    assert replace[second].tolist() == pytest.approx([-0.1] * 3)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.05]


def test_adopt_keeps_names_beside_their_parameters() -> None:
    kept, frozen = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1), requires_grad=False)
    optimizer = torch.optim.SGD([("frozen", frozen), ("kept", kept)], lr=0.1)
    optim.adopt(optimizer, {kept: nn.Parameter(torch.zeros(1))})
    assert optimizer.param_groups[0]["param_names"] == ["kept"]


def adopt_with_state(rank: int) -> list[Tensor]:
    params = masters_of(weights())
    optimizer = torch.optim.NAdam(params, lr=0.05)
    train(optimizer, params, 2, lambda grad: grad)
    replace, shards = partitioned(params, rank)
    optim.adopt(optimizer, replace, shards=shards)
    for step in (2, 3):
        for param, grad in zip(params, gradients(step), strict=True):
            assert grad is not None
            replace[param].grad = shards[replace[param]].mine(grad)
        optimizer.step()
    return [replace[param].detach() for param in params]


def test_adopted_state_goes_on(ranks: Ranks) -> None:
    pieces = ranks.run(2, adopt_with_state)
    for at, value in enumerate(single(lambda masters: torch.optim.NAdam(masters, lr=0.05))):
        torch.testing.assert_close(torch.cat([own[at] for own in pieces]), value.flatten(), rtol=0, atol=1e-6)


class Stranger(torch.optim.SGD):
    """An optimizer nobody knows."""


def refusals(rank: int) -> list[str]:
    params = [nn.Parameter(torch.randn(4, 2))]
    replace, shards = partitioned(params, rank)
    texts = []
    for optimizer, allow in [
        (torch.optim.LBFGS(params), True),
        (torch.optim.Adafactor(params), True),
        (torch.optim.Muon(params), True),
        (optim.build("Lamb", {}, params), True),
        (Stranger(params, lr=0.1), False),
    ]:
        before = optimizer.param_groups[0]["params"][0]
        try:
            optim.adopt(optimizer, replace, shards=shards, allow_untested=allow)
        except ValueError as error:
            texts.append(str(error))
        assert optimizer.param_groups[0]["params"][0] is before
    allowed = Stranger(params, lr=0.1)
    optim.adopt(allowed, replace, shards=shards, allow_untested=True)
    assert allowed.param_groups[0]["params"][0] is replace[params[0]]
    return texts


def test_adopt_refuses_what_cannot_work_on_pieces(ranks: Ranks) -> None:
    for texts in ranks.run(2, refusals):
        assert [text.split(":")[0] for text in texts[:4]] == [
            "the optimizer LBFGS cannot be used with the engine",
            "the optimizer Adafactor cannot step partitioned parameters (ZeRO stages 1 to 3)",
            "the optimizer Muon cannot step partitioned parameters (ZeRO stages 1 to 3)",
            "the optimizer Lamb cannot step partitioned parameters (ZeRO stages 1 to 3)",
        ]
        assert '"zero_allow_untested_optimizer": true' in texts[4]
        assert len(texts) == 5


def test_whole_masters_may_be_stepped_by_any_optimizer() -> None:
    param = nn.Parameter(torch.randn(4, 2))
    master = nn.Parameter(param.detach().clone())
    for kind in (torch.optim.Adafactor, torch.optim.Muon):
        optim.adopt(kind([param]), {param: master}, shards={master: whole(master)})


def test_adopt_names_parameters_of_another_model() -> None:
    mine, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3, 3))
    optimizer = torch.optim.SGD([{"params": [mine]}, {"params": [other]}], lr=0.1)
    with pytest.raises(ValueError, match=r"group 1 has a parameter of shape \(3, 3\) that the model does not have"):
        optim.adopt(optimizer, {mine: nn.Parameter(torch.zeros(2))})
    assert optimizer.param_groups[0]["params"][0] is mine
