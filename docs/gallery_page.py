"""docs/gallery.md, made from committed results: `python docs/gallery_page.py > docs/gallery.md`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from dsprof.analyzer.text import clean, ms, percent, unit_of

RESULTS: Final = Path(__file__).parent.parent / "benchmarks" / "results"

HEAD: Final = """\
# Cases

What dsprof said of real jobs that had a known fault, what was changed, and what that saved: the prediction from the run
with the fault beside the difference to a run without it, as it was measured. Those on a GPU come first, then some of
those that ran on [two CPU cores](accuracy.md) and were chosen before they were run. Two went wrong, and say how. The
numbers are those of `benchmarks/results/gpu_pairs.json` and `predictions.json`.

"""

ON_GPU: Final = (
    ("a loader without workers", "A loader that has no workers"),
    ("a loader with too few workers", "A loader that has too few"),
    ("checkpoints", "Checkpoints that stop training"),
    ("pageable images", "Images in pageable memory: right about where, wrong about how much"),
)
"""Pairs of gpu_pairs.json, and what they are called."""

WHY: Final = {
    "pageable images": "The images were pinned as advised, and the step stayed what it was: the wait for input,\n"
    "{before} a step before, became {after}. The loader had no batch ready sooner, which the copies had hidden.\n"
    "dsprof predicts what one change saves, and did not see that another wait stood behind this one; the run\n"
    "without the fault names it.",
}

ON_CPU: Final = (
    ("f01 straggler, DDP", "One rank computes longer than the other"),
    ("f07 slow disk, engine", "A slow disk"),
    ("f09 small buckets, DDP", "Buckets that are too small"),
    ("f14 slow stage, 1F1B", "A pipeline with one slow stage"),
    ("f19 evaluation on rank 0, DDP", "Evaluation on rank 0 while the others wait: the interval missed"),
)
"""Pairs of predictions.json, chosen before any ran."""

SAID: Final = {
    "rank.straggler": "give the slow rank what the others have: here, the same work",
    "data.stall": "more workers for the loader, that stay: `num_workers`, `persistent_workers=True`",
    "comm.small-messages": "a larger `bucket_cap_mb`",
    "pipeline.imbalance": "move layers from the slow stage to the others",
    "eval.uneven": "evaluate on all ranks",
}
"""What is advised, by code."""


def load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def interval(low: float, high: float, value: float) -> str:
    """`[35.2, 82.5]`, in the unit of what they stand beside."""
    unit = unit_of(value)
    return f"[{unit.number(low)}, {unit.number(high)}]"


def on_gpu(name: str, title: str, pair: dict[str, Any], device: str) -> list[str]:
    """A section on a pair of runs on a GPU."""
    fault, mended = pair["fault"], pair["mended"]
    first = next(one for one in fault["findings"] if one["severity"] != "info")
    low, middle, high = pair["predicted_ms"]
    lines = [
        f"## {title}", "", f"{device}. A step takes {ms(fault['own_step_ms'])}.", "",
        f"    {clean(fault['headline'], 1000)}", "", f"- **finding**: `{first['code']}`, {first['severity']}",
        f"- **fix**: {clean(first['fix'])}",
        f"- **predicted**: saves {ms(middle)} a step {interval(low, high, middle)}",
        f"- **measured**: saves {ms(pair['saved_ms'])}, a step of {ms(mended['own_step_ms'])} is left",
        f"- **and then**: {clean(mended['headline'], 1000)}",
    ]  # fmt: skip
    return [*lines, "", *([_why(name, pair), ""] if name in WHY else [])]


def _why(name: str, pair: dict[str, Any]) -> str:
    before, after = (ms(pair[side]["budget_ms"]["data"]) for side in ("fault", "mended"))
    return WHY[name].format(before=before, after=after)


def on_cpu(title: str, pair: dict[str, Any]) -> list[str]:
    """A section on a pair of runs on CPUs, five of each."""
    first = pair["predicted"][0]
    low, high = pair["saving_interval_ms"]
    predicted = interval(first["low"], first["high"], first["ms"])
    kept = f"{pair['of_all_hold']} of {len(pair['predicted'])} intervals hold what was measured"
    return [
        f"## {title}", "", f"{_capital(pair['magnitude'].strip())}. A step takes {ms(pair['step_ms'])}.", "",
        f"- **job**: `{pair['planted']}`", f"- **finding**: `{pair['fault']}`, {first['severity']}",
        f"- **fix**: {SAID[pair['fault']]}",
        f"- **predicted** by the first run: saves {ms(first['ms'])} a step {predicted}",
        f"- **measured**: saves {ms(pair['saving_ms'])} ({percent(pair['gain_percent'])}) "
        f"{interval(low, high, pair['saving_ms'])}; of the runs' predictions {kept}", "",
    ]  # fmt: skip


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def render() -> str:
    """The whole page."""
    gpu, cpu = load("gpu_pairs.json"), load("predictions.json")
    device = gpu["machine"]["device"]
    lines = [line for name, title in ON_GPU for line in on_gpu(name, title, gpu["each"][name], device)]
    lines += [line for name, title in ON_CPU for line in on_cpu(title, cpu["pairs"][name])]
    return HEAD + "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(render(), end="")
