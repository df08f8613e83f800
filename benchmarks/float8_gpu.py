"""What float8 gains for a linear layer on a GPU: predicted from its shape, and measured, of ten shapes.

    python benchmarks/float8_gpu.py --output benchmarks/results/float8_gpu.json      # three minutes, one GPU

For each layer of inputs [M, K] and a weight [N, K] in bf16, forward and backward: as it is, in float8 by dsprof's
engine, and by torchao (compiled) where it is installed. Arms take turns; each figure is the median of what the device
took while the host was ahead of it. `predicted` is what `dsprof.engine.precision.gain` says from the device's data
sheet, as the finding precision.fp8 and `fp8.filter: auto` do: at least, as expected, at most. Writes after each shape,
and goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from dsprof.engine.precision import linear
from dsprof.engine.precision.device import arithmetic
from dsprof.engine.precision.gain import Recipe, layer_time, listed_rates

SHAPES: Final = (
    (1024, 2048, 1024), (2048, 2048, 2048), (4096, 1024, 4096), (4096, 4096, 4096), (8192, 4096, 4096),
    (16384, 2048, 8192), (8192, 4096, 14336), (8192, 14336, 4096), (4096, 8192, 16384), (16384, 8192, 8192),
)  # fmt: skip
"""M, K, N."""
BY_ROWS: Final = SHAPES[3::3]
"""Shapes of which scales by rows are tried, too."""
CALLS: Final = 8
ROUNDS: Final = 9
AHEAD_CYCLES: Final = 60_000_000
"""Of the device, for which it is kept busy while the host launches: some 30 ms."""

Arm = Callable[[], object]


def layer(k: int, n: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(k, n, bias=False)).to("cuda", torch.bfloat16)


def arm(module: Callable[..., torch.Tensor], m: int, k: int, n: int) -> Arm:
    """Forward and backward, with the gradients of inputs and weight."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)

    def call() -> None:
        x.grad = None
        module(x).backward(out)

    return call


def by_torchao(k: int, n: int, recipe: Recipe) -> nn.Module | str:
    """The layer; or why there is none."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe)
        torch.compiler.reset()
        compiled: nn.Module = torch.compile(convert_to_float8_training(layer(k, n), config=config), dynamic=False)
    except Exception as error:  # whatever is missing
        return f"{type(error).__name__}: {error}"
    return compiled


def device_ms(call: Arm) -> float:
    """Of one call, on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD_CYCLES)
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / CALLS


def measured(m: int, k: int, n: int, recipe: Recipe) -> dict[str, Any]:
    arms: dict[str, Arm] = {"bf16": arm(layer(k, n), m, k, n)}
    engine = layer(k, n)
    linear.install(engine, arithmetic(torch.device("cuda"), recipe), lambda *_: True)
    arms["engine"] = arm(engine, m, k, n)
    missing = None
    torchao = by_torchao(k, n, recipe)
    if isinstance(torchao, str):
        missing = torchao
    else:
        arms["torchao"] = arm(torchao, m, k, n)
    for name, call in list(arms.items()):
        try:
            for _ in range(3):
                call()
        except Exception as error:  # of a library that does not fit this torch
            if name != "torchao":
                raise
            missing = f"{type(error).__name__}: {error}"[:300]
            del arms[name]
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(ROUNDS):
        for name, call in arms.items():
            times[name].append(device_ms(call))
    found = {name: statistics.median(of) for name, of in times.items()}
    rates = listed_rates(torch.cuda.get_device_name(), "bfloat16")
    assert rates is not None, "no data sheet is known of this device"
    predicted = [layer_time(m, k, n, one, recipe) for one in rates]
    saved = found["bf16"] - found["engine"]
    low, expected, high = (1e3 * one.saved for one in predicted)
    return {
        "recipe": recipe, "m": m, "k": k, "n": n,
        "ms": {name: round(value, 4) for name, value in found.items()},
        "tflops_as_it_is": round(6 * m * k * n / found["bf16"] / 1e9, 1),
        "times_as_fast": {name: round(found["bf16"] / value, 3) for name, value in found.items() if name != "bf16"},
        "predicted_times_as_fast": [round(one.as_is / one.float8, 3) for one in predicted],
        "predicted_ms_as_it_is": round(1e3 * predicted[1].as_is, 4),
        "predicted_saved_ms": [round(one, 4) for one in (low, expected, high)], "saved_ms": round(saved, 4),
        "error_percent_of_layer": round(100 * abs(expected - saved) / found["bf16"], 1),
        "holds": min(low, expected) <= saved <= max(high, expected),
        "chosen_rightly": (expected > 0) == (saved > 0),
        **({"torchao": missing} if missing else {}),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    jobs: list[tuple[tuple[int, int, int], Recipe]] = [(shape, "tensorwise") for shape in SHAPES]
    jobs += [(shape, "rowwise") for shape in BY_ROWS]
    each = json.loads(args.output.read_text())["each"] if args.output.exists() else []
    for shape, recipe in jobs:
        if any((one["m"], one["k"], one["n"], one["recipe"]) == (*shape, recipe) for one in each):
            continue
        each.append(measured(*shape, recipe))
        print(json.dumps(each[-1]), flush=True)
        result = {
            "machine": {
                "device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
            },
            "holds": f"{sum(one['holds'] for one in each)} of {len(each)}",
            "chosen_rightly": f"{sum(one['chosen_rightly'] for one in each)} of {len(each)}",
            "median_error_percent_of_layer": statistics.median(one["error_percent_of_layer"] for one in each),
            "each": each,
        }  # fmt: skip
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
