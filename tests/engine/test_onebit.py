"""1-bit Adam: its codec, its error feedback, what it sends, and that it learns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, everyone
from spans import recorded
from torch import Tensor, nn

from dsprof.engine.comm.comm import Comm
from dsprof.engine.optim import build
from dsprof.engine.optim.onebit import OneBitAdam, compressed_mean_, decode, encode, pack_signs, unpack_signs


def one_bit_adam(params: list[nn.Parameter], comm: Comm | None, **options: Any) -> OneBitAdam:
    made = build("OneBitAdam", options, params, comm=comm)
    assert isinstance(made, OneBitAdam)
    return made


# --- the codec


def test_one_bit_a_value() -> None:
    rows = torch.tensor([[1.0, -1, 0, -2, 3, -0.5, -1, 1], [-1.0] * 8])
    packed = pack_signs(rows)
    assert packed.tolist() == [[0b10010101], [0]]
    assert unpack_signs(packed, torch.float32).tolist() == [[1, -1, 1, -1, 1, -1, -1, 1], [-1] * 8]


def test_signs_survive_packing() -> None:
    rows = torch.randn(3, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert pack_signs(rows).shape == (3, 5)
    assert torch.equal(unpack_signs(pack_signs(rows), torch.float64), rows.sign())


def test_each_tensor_has_a_scale_of_its_own_in_each_row() -> None:
    rows = torch.tensor([[1.0, -7, 8, 0, 0, 0, 0, 0], [6.0, 0, -1, 0, 0, 0, 0, 0]])
    alive = torch.tensor([[True] * 3 + [False] * 5, [True, False, True] + [False] * 5])
    messages = encode(rows, alive, [2, 1])
    assert messages.shape == (2, 1 + 2 * 4)
    assert decode(messages, [2, 1], torch.float32)[:, :3].tolist() == [[5, -5, 8], [6, 6, -1]]


# --- error feedback


def means_and_errors(rank: int) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Sums over 50 rounds of what went in and what came out, and the errors left."""
    shapes, size = [(5, 3), (7,), ()], dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    live = [torch.ones(shape, dtype=torch.bool) for shape in shapes]
    live[1][2] = False
    worker = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    server = [torch.zeros(-(-value.numel() // size), dtype=torch.float64) for value in worker]
    entered, left = copy.deepcopy(worker), copy.deepcopy(worker)
    for _ in range(50):
        values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        torch._foreach_add_(entered, values)
        compressed_mean_(values, worker, server, live, everyone())
        torch._foreach_add_(left, values)
    return entered, left, worker, server


@pytest.mark.parametrize("size", [2, 3])
def test_what_signs_lose_is_kept(ranks: Ranks, size: int) -> None:
    """Sum of the results + what the servers keep + the mean of what the workers keep = the sum of the true means."""
    results = ranks.run(size, means_and_errors)
    for at, received in enumerate(results[0][1]):
        for other in results[1:]:
            assert torch.equal(received, other[1][at])
        true = torch.stack([entered[at] for entered, *_ in results]).mean(0).flatten()
        workers = torch.stack([worker[at] for _, _, worker, _ in results]).mean(0).flatten()
        servers = torch.cat([server[at] for *_, server in results])[: true.numel()]
        if at == 1:  # an element that is not live stays zero, and leaves no error
            assert (received[2], workers[2], servers[2]) == (0, 0, 0)
            true[2] = 0
        torch.testing.assert_close(received.flatten() + servers + workers, true, rtol=0, atol=1e-10)


# --- the optimizer


def test_the_warm_up_is_adamw() -> None:
    torch.manual_seed(3)
    ours = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(()))]
    theirs = copy.deepcopy(ours)
    one_bit = one_bit_adam(ours, None, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, freeze_step=9)
    adamw = torch.optim.AdamW(theirs, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    for step in range(9):
        assert not one_bit.wants_local_gradients
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape)
            other.grad = mine.grad.clone()
        if step == 4:
            ours[1].grad = theirs[1].grad = None
        one_bit.step()
        adamw.step()
    assert one_bit.wants_local_gradients
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_the_variance_is_frozen_after_the_warm_up() -> None:
    param = nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = one_bit_adam([param], None, lr=0.1, betas=(0.5, 0.75), eps=1e-12, freeze_step=1)
    param.grad = torch.tensor([2.0, 0.0])
    optimizer.step()  # corrected: m = 2, v = 4
    assert param.tolist() == pytest.approx([0.9, 1.0])
    for first in (0.5 * 1 + 0.5 * 6, 0.5 * 3.5 + 0.5 * 6):
        step = 2 if first == 3.5 else 3
        before = param[0].item()
        param.grad = torch.tensor([6.0, 6.0])  # the second element has no variance, and is left alone
        optimizer.step()
        assert param[0].item() == pytest.approx(before - 0.1 * first / (1 - 0.5**step) / 2)
        assert param[1].item() == 1.0


def test_a_parameter_that_comes_after_the_warm_up_is_told() -> None:
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    optimizer = one_bit_adam(params, None, freeze_step=1)
    params[0].grad = torch.ones(2)
    optimizer.step()
    params[1].grad = torch.ones(3)
    with pytest.warns(UserWarning, match=r"shape \(3,\) has its first gradient after the warm-up of 1 steps"):
        optimizer.step()
    assert params[1].tolist() == [0, 0, 0]


def least_squares(rank: int, kind: str, steps: int) -> tuple[float, Tensor]:
    """Loss over both ranks' data after some steps, and the weights."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 256, 24, generator=generator)
    targets = inputs @ torch.randn(24, 4, generator=generator) + 0.5 * torch.randn(2, 256, 4, generator=generator)
    weight, bias = nn.Parameter(torch.zeros(24, 4)), nn.Parameter(torch.zeros(4))
    optimizer: Any
    if kind == "adam":
        optimizer = torch.optim.Adam([weight, bias], lr=0.05)
    else:
        optimizer = one_bit_adam([weight, bias], everyone(), lr=0.05, freeze_step=100)
    order = torch.Generator().manual_seed(rank)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 - step / steps)
        batch = torch.randint(256, (32,), generator=order)
        loss = (inputs[rank, batch] @ weight + bias - targets[rank, batch]).square().mean()
        grads = torch.autograd.grad(loss, [weight, bias])
        for param, grad in zip((weight, bias), grads, strict=True):
            if kind == "adam" or not optimizer.wants_local_gradients:
                dist.all_reduce(grad)
                grad /= 2
            param.grad = grad
        optimizer.step()
    with torch.no_grad():
        final = (inputs @ weight + bias - targets).square().mean().item()
    return final, torch.cat([weight.detach().flatten(), bias.detach()])


def test_it_learns_as_well_as_adam(ranks: Ranks) -> None:
    (loss, weights), (_, others) = ranks.run(2, least_squares, "onebit", 400)
    (adams, _), _ = ranks.run(2, least_squares, "adam", 400)
    assert torch.equal(weights, others)
    assert abs(loss / adams - 1) < 0.02


def bytes_of_a_step(rank: int) -> list[tuple[Any, ...]]:
    params = [nn.Parameter(torch.randn(256, 255)), nn.Parameter(torch.randn(64))]
    optimizer = one_bit_adam(params, everyone(), freeze_step=1)
    for _ in range(2):
        for param in params:
            param.grad = torch.randn(param.shape)
        with recorded() as spans:
            optimizer.step()
    return [(s.kind, s.name, s.lane, s.purpose, s.bytes, s.dtype) for s in spans]


def test_bytes_on_the_wire(ranks: Ranks) -> None:
    size = 2
    for seen in ranks.run(size, bytes_of_a_step):
        # A row: (256 * 255 + 64) / 2 bits, and two scales.
        row = (256 * 255 + 64) // 2 // 8 + 2 * 4
        assert seen == [
            ("comm", "all_to_all", "main", "gradient", size * row, "uint8"),
            ("comm", "all_gather", "main", "gradient", size * row, "uint8"),
        ]
        share = (size - 1) / size  # of the bytes of an all-to-all or all-gather that travel; an all-reduce's twice
        compressed = sum(share * bytes for *_, bytes, _ in seen)
        assert 2 * share * 4 * (256 * 255 + 64) / compressed > 31


def resumed(rank: int) -> tuple[Tensor, Tensor, list[str]]:
    """Ten steps at once and in two halves, with tiles of other shape in the second."""

    def grads(step: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + (rank if step >= 3 else 0))
        return [torch.randn(9, 5, generator=generator), torch.randn(7, generator=generator)]

    def run(optimizer: OneBitAdam, params: list[nn.Parameter], steps: range) -> None:
        for step in steps:
            for param, grad in zip(params, grads(step), strict=True):
                param.grad = grad
            optimizer.step()

    def fresh() -> tuple[OneBitAdam, list[nn.Parameter]]:
        params = [nn.Parameter(torch.ones(9, 5)), nn.Parameter(torch.ones(7))]
        return one_bit_adam(params, everyone(), lr=0.01, freeze_step=3), params

    whole, expected = fresh()
    run(whole, expected, range(10))
    first, early = fresh()
    run(first, early, range(6))
    second, late = fresh()
    with torch.no_grad():
        torch._foreach_copy_(late, early)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.wants_local_gradients
    for step in range(6, 10):
        for at, (param, grad) in enumerate(zip(late, grads(step), strict=True)):
            late[1 - at].grad = None
            param.grad = grad
            second.step(last_tile=at == 1)
    assert second.param_groups[0]["training_steps"] == 10
    flat = [torch.cat([param.detach().flatten() for param in params]) for params in (expected, late)]
    return flat[0], flat[1], sorted(second.state[late[0]])


def test_resuming_and_tiles_change_nothing(ranks: Ranks) -> None:
    for expected, late, state in ranks.run(2, resumed):
        assert torch.equal(expected, late)
        assert state == ["exp_avg", "exp_avg_sq", "server_error", "step", "worker_error"]
