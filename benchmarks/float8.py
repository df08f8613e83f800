"""What float8 does to a loss: a small GPT in bf16, and with its linear layers in float8, from the same weights on the
same data. `python benchmarks/float8.py [--steps 300] [--output benchmarks/results/float8.json]`

The loss compared is the mean over the last sixth of the steps. Beside it, for each layer at the trained weights, how
far its outputs and its weight's gradient in float8 are from those in bf16, as a part of their norms. One process on a
CPU: numbers, not times.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any, Final

import torch
from block import Block
from torch import Tensor, nn
from torch.nn import functional as F

from dsprof import engine as ds
from dsprof.engine.precision import linear
from dsprof.engine.precision.device import arithmetic

ARMS: Final[dict[str, dict[str, Any]]] = {
    "bf16": {},
    "tensorwise": {"fp8": {"enabled": True, "filter": "all", "recipe": "tensorwise"}},
    "rowwise": {"fp8": {"enabled": True, "filter": "all", "recipe": "rowwise"}},
}
VOCABULARY: Final = 64
LENGTH: Final = 32
SAMPLES: Final = 8


class GPT(nn.Module):
    """Its loss on tokens [samples, length + 1]."""

    def __init__(self, width: int = 64, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids[:, :-1]) + self.places(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), ids[:, 1:].flatten())


def batches(steps: int) -> Tensor:
    """Tokens [step, samples, length + 1]: each follows the two before it by a rule that is broken now and then."""
    random = torch.Generator().manual_seed(5)
    rule = torch.randint(0, VOCABULARY, (VOCABULARY, 4), generator=random)
    ids = torch.randint(0, VOCABULARY, (steps, SAMPLES, LENGTH + 1), generator=random)
    follows = torch.rand(ids.shape, generator=random) < 0.9
    for at in range(2, LENGTH + 1):
        next_one = rule[ids[..., at - 1], ids[..., at - 2] % 4]
        ids[..., at] = torch.where(follows[..., at], next_one, ids[..., at])
    return ids


def train(arm: str, steps: int) -> tuple[list[float], nn.Module]:
    """The loss of each step, and the trained model."""
    torch.manual_seed(1)
    model = GPT()
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES, "gradient_clipping": 1.0, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}, **ARMS[arm],
    }  # fmt: skip
    engine, *_ = ds.initialize(
        model=model, model_parameters=model.parameters(), config=config, dist_init_required=False
    )
    losses = []
    for ids in batches(steps):
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses, model


def layer_errors(model: nn.Module, recipe: Any) -> dict[str, dict[str, float]]:
    """Layer -> how far outputs and the weight's gradient are from those without float8, as a part of their norms: of
    the inputs and the output gradients that it has in one backward of the model."""
    given: dict[str, list[Tensor]] = {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    handles = []
    for name, module in layers.items():

        def note(module: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
            given[name] = [args[0].detach()]
            output.register_hook(lambda grad: given[name].append(grad.detach()))

        handles.append(module.register_forward_hook(note))
    model(batches(1)[0]).backward()
    for handle in handles:
        handle.remove()
    found = {}
    for name, module in layers.items():
        x, grad = given[name]
        values = []
        for fp8 in (False, True):
            undo = linear.install(module, arithmetic(x.device, recipe), lambda *_: True) if fp8 else lambda: None
            module.zero_grad()
            output = module(x)
            output.backward(grad)
            assert module.weight.grad is not None
            values.append([output.detach().float(), module.weight.grad.float()])
            undo()
        found[name] = {
            what: round(((eight - plain).norm() / plain.norm()).item(), 4)
            for what, plain, eight in zip(("outputs", "weight gradient"), *values, strict=True)
        }
    return found


def compare(steps: int) -> dict[str, Any]:
    last = max(steps // 6, 1)
    losses: dict[str, list[float]] = {}
    results: dict[str, Any] = {"torch": torch.__version__, "steps": steps, "arms": {}}
    for arm in ARMS:
        losses[arm], model = train(arm, steps)
        loss = sum(losses[arm][-last:]) / last
        results["arms"][arm] = {"first loss": round(losses[arm][0], 4), "loss": round(loss, 4)}
        if arm != "bf16":
            errors = layer_errors(model, arm)
            worst = max(errors, key=lambda name: errors[name]["weight gradient"])
            beside = loss / results["arms"]["bf16"]["loss"] - 1
            results["arms"][arm] |= {
                "beside bf16, percent": round(100 * beside, 2), "worst layer": {worst: errors[worst]}, "layers": errors,
            }  # fmt: skip
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = compare(args.steps)
    text = json.dumps(results, indent=1)
    if args.output is not None:
        args.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
