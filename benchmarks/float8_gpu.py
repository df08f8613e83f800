"""What float8 gains for a linear layer on a GPU: predicted from its shape, and measured, of ten shapes.

    python benchmarks/float8_gpu.py --output benchmarks/results/float8_gpu.json      # three minutes, one GPU

For each layer of inputs [M, K] and a weight [N, K] in bf16, forward and backward: as it is, in float8 by dsprof's
engine, and by torchao (compiled) where it is installed. Arms take turns; each figure is the median of what the device
took while the host was ahead of it. `predicted` is what `dsprof.engine.precision.gain` says from the device's data
sheet, as the finding precision.fp8 and `fp8.filter: auto` do: at least, as expected, at most. Writes after each shape,
and goes on where it was. `casts` says which ones the engine had: of `torch.compile`'s, or its own in Triton.
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


def measured(m: int, k: int, n: int, recipe: Recipe, torchao: bool) -> dict[str, Any]:
    arms: dict[str, Arm] = {"bf16": arm(layer(k, n), m, k, n)}
    engine = layer(k, n)
    linear.install(engine, arithmetic(torch.device("cuda"), recipe), lambda *_: True)
    arms["engine"] = arm(engine, m, k, n)
    missing = None
    other = by_torchao(k, n, recipe) if torchao else "not asked for"
    if isinstance(other, str):
        missing = other
    else:
        arms["torchao"] = arm(other, m, k, n)
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
    return {
        "recipe": recipe, "m": m, "k": k, "n": n, "casts": "triton",
        "ms": {name: round(statistics.median(of), 4) for name, of in times.items()},
        **({"torchao": missing} if missing else {}),
    }  # fmt: skip


def beside(one: dict[str, Any], device: str) -> dict[str, Any]:
    """What was measured, with what is predicted."""
    m, k, n, recipe, took = (one[key] for key in ("m", "k", "n", "recipe", "ms"))
    rates = listed_rates(device, "bfloat16")
    assert rates is not None, "no data sheet is known of this device"
    predicted = [layer_time(m, k, n, each, recipe) for each in rates]
    low, expected, high = (1e3 * each.saved for each in predicted)
    saved = {name: took["bf16"] - value for name, value in took.items() if name != "bf16"}
    return {
        **{key: one[key] for key in ("recipe", "m", "k", "n", "casts", "ms", "torchao") if key in one},
        "tflops_as_it_is": round(6 * m * k * n / took["bf16"] / 1e9, 1),
        "times_as_fast": {name: round(took["bf16"] / took[name], 3) for name in saved},
        "predicted_times_as_fast": [round(each.as_is / each.float8, 3) for each in predicted],
        "saved_ms": {name: round(value, 4) for name, value in saved.items()},
        "predicted_saved_ms": [round(each, 4) for each in (low, expected, high)],
        "error_percent_of_layer": {
            name: round(100 * abs(expected - value) / took["bf16"], 1) for name, value in saved.items()
        },
        "holds": {name: min(low, expected) <= value <= max(high, expected) for name, value in saved.items()},
        "chosen_rightly": {name: (expected > 0) == (value > 0) for name, value in saved.items()},
    }  # fmt: skip


def write(path: Path, machine: dict[str, str], measured: list[dict[str, Any]]) -> None:
    each = [beside(one, machine["device"]) for one in measured]
    arms = sorted({name for one in each for name in one["saved_ms"]})

    def of(key: str, name: str) -> list[Any]:
        return [one[key][name] for one in each if name in one[key]]

    result = {
        "machine": machine,
        "summary": {
            name: {
                "holds": f"{sum(of('holds', name))} of {len(of('holds', name))}",
                "chosen_rightly": f"{sum(of('chosen_rightly', name))} of {len(of('chosen_rightly', name))}",
                "median_error_percent_of_layer": statistics.median(of("error_percent_of_layer", name)),
            }
            for name in arms
        },
        "each": each,
    }  # fmt: skip
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--without-torchao", action="store_true")
    parser.add_argument("--predict", action="store_true", help="anew, of what was measured: needs no GPU")
    args = parser.parse_args()
    before: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {"each": []}
    if args.predict:
        write(args.output, before["machine"], before["each"])
        return
    machine = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()
    }  # fmt: skip
    jobs: list[tuple[tuple[int, int, int], Recipe]] = [(shape, "tensorwise") for shape in SHAPES]
    jobs += [(shape, "rowwise") for shape in BY_ROWS]
    each = before["each"]
    for shape, recipe in jobs:
        if any((one["m"], one["k"], one["n"], one["recipe"]) == (*shape, recipe) for one in each):
            continue
        each.append(measured(*shape, recipe, torchao=not args.without_torchao))
        print(json.dumps(each[-1]), flush=True)
        write(args.output, machine, each)


if __name__ == "__main__":
    main()
