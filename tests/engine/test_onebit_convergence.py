"""1-bit Adam on the example's model and text: it learns what Adam does, and its gradients hardly travel."""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from spans import recorded

from dsprof import engine as ds
from dsprof.engine.hooks import Span

STEPS, FREEZE = 240, 80


def example() -> Any:
    path = Path(__file__).parents[2] / "examples" / "train_gpt.py"
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bytes_sent(spans: list[Span]) -> dict[int, float]:
    """What gradients and momenta take on the wire, step by step."""
    found: dict[int, float] = {}
    for span in spans:
        if span.kind == "comm" and span.purpose in ("gradient", "optimizer") and span.bytes:
            # Two ranks: an all-reduce sends each byte twice halved, the others send half of what they hold.
            sent = span.bytes if span.name == "all_reduce" else span.bytes / 2
            found[span.step] = found.get(span.step, 0) + sent
    return found


def train(rank: int, optimizer: dict[str, Any], steps: int) -> tuple[list[float], dict[int, float], torch.Tensor]:
    module = example()
    torch.manual_seed(0)
    model = module.GPT(256, 32, 32, 4, 2)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "optimizer": optimizer}
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    text = module.StandardLibrary(32)
    order = torch.randint(len(text), (steps, 2, 4), generator=torch.Generator().manual_seed(3))
    losses = []
    with recorded() as spans:
        for step in order:
            samples = [text[int(at)] for at in step[rank]]
            inputs, targets = (torch.stack([torch.as_tensor(s[part]) for s in samples]) for part in (0, 1))
            logits = engine(inputs)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return losses, bytes_sent(spans), weights


@pytest.mark.slow  # test_onebit trains less, and is in `make test`
def test_one_bit_adam_learns_as_adam_does_with_a_sixteenth_of_the_bytes(ranks: Ranks) -> None:
    params = {"lr": 1e-3}
    adam = ranks.run(2, train, {"type": "AdamW", "params": params}, STEPS)
    onebit = ranks.run(2, train, {"type": "OneBitAdam", "params": {**params, "freeze_step": FREEZE}}, STEPS)

    def last(results: list[Any]) -> float:
        return statistics.fmean(statistics.fmean(losses[-10:]) for losses, _, _ in results)

    assert last(adam) < 0.8 * statistics.fmean(losses[0] for losses, _, _ in adam)  # it does learn
    assert abs(last(onebit) / last(adam) - 1) < 0.02
    (_, of_adam, _), (_, of_onebit, first) = adam[0], onebit[0]
    assert of_onebit[FREEZE - 1] == of_adam[FREEZE - 1]  # the warm-up is Adam
    assert of_onebit[STEPS - 1] * 16 <= of_adam[STEPS - 1]
    assert torch.equal(first, onebit[1][2])  # the ranks agree bit for bit
