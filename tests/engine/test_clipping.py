"""What scripts do to gradients between backward and step: it has an effect, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import WIDTH, Layers, configuration, engine_for
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

SAID = "torch.nn.utils.clip_grad: gradients are the engine's from backward to step, and that of 0.weight is not in"


def clips(rank: int, stage: int) -> list[str]:
    """What torch's functions say after a backward, however they are called and were imported."""
    with engine_for(Layers(2), configuration(stage)) as engine:
        params = list(engine.module.parameters())
        nn.utils.clip_grad_norm_(params, 1.0)  # nothing is held yet
        engine.backward(engine(torch.ones(2, WIDTH)))
        said = []
        for call in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_, clip_grad_norm_, clip_grad_value_):
            with pytest.raises(RuntimeError) as caught:
                call(params, 1.0)
            said.append(str(caught.value))
        engine.step()
        nn.utils.clip_grad_norm_(params, 1.0)
        return said


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping_that_would_find_no_gradients_is_refused(ranks: Ranks, stage: int) -> None:
    for said in ranks.run(2, clips, stage):
        assert len(said) == 4
        assert all(text.startswith(SAID) and "safe_set_full_grad" in text for text in said)


def test_gradients_that_are_added_up_beside_autograd_are_not_clipped_in_part() -> None:
    config = configuration(0, gradient_accumulation_steps=2, bf16={"enabled": True})
    with engine_for(Layers(2), config) as engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)))
            if engine.state.under_way == 0:
                engine.step()
        with pytest.raises(RuntimeError, match=SAID):
            nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)


def test_whole_gradients_of_one_rank_are_clipped() -> None:
    other = nn.Linear(WIDTH, WIDTH)
    other(torch.ones(1, WIDTH)).sum().backward()
    assert nn.utils.clip_grad_norm_(other.parameters(), 1.0) > 1  # another model's, too
    with engine_for(Layers(2), configuration(0)) as engine:
        before = [param.detach().clone() for param in engine.module.parameters()]
        engine.backward(engine(torch.full((2, WIDTH), 10.0)))
        assert nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3) > 1
        engine.step()
        changed = torch.stack(
            [(now - then).norm() for now, then in zip(engine.module.parameters(), before, strict=True)]
        )
        assert changed.norm().item() == pytest.approx(0.1 * 1e-3, rel=1e-2)


# --- hooks


def double(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(2)


def hooked(rank: int, stage: int, more: dict[str, Any]) -> list[float | None]:
    """A hook of the script's own, after `initialize`: the norms of two steps."""
    with engine_for(Layers(3), configuration(stage, **more)) as engine:
        for param in engine.module.parameters():
            param.register_post_accumulate_grad_hook(double)
        engine.optimizer.param_groups[0]["lr"] = 0.0
        norms = []
        for _ in range(2):  # the second time with buckets in another order
            engine.backward(engine(torch.full((2, WIDTH), 1.0 + rank)))
            engine.step()
            norms.append(engine.get_global_grad_norm())
        return norms


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hooks_on_accumulated_gradients_come_before_the_engines(ranks: Ranks, stage: int) -> None:
    model = Layers(3)
    for rank in (0, 1):
        model(torch.full((2, WIDTH), 1.0 + rank)).backward()
    wanted = nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None]).item()
    zero = {"reduce_bucket_size": WIDTH * WIDTH} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    more = {"zero_optimization": {"stage": stage, **zero}}
    for norms in ranks.run(2, hooked, stage, more):
        assert norms == pytest.approx([wanted] * 2, rel=1e-5)
