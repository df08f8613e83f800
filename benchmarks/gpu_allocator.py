"""The allocator twin against the allocator of a GPU: programs under PYTORCH_CUDA_ALLOC_CONF's settings.

    python benchmarks/gpu_allocator.py      # some three minutes; writes benchmarks/results/gpu-allocator-<name>.json
    python benchmarks/gpu_allocator.py --program churn --processes 1

Each program allocates and frees the same under every setting, in a process of its own whose history is recorded. Of
each run is asked

    exact      whether the twin, begun from the state before the history, makes every segment in order and size, every
               block at its address and the exact reserved bytes under that setting (`prove`)
    predicted  what the twin says of this setting from the histories recorded under others (`replay`): the peak of what
               is reserved, segments got and given back, retries; against what torch counted

    churn        blocks of 512 bytes to 64 MiB that live for a random time
    growing      a sequence that grows with each step, beside blocks that stay
    pinned       segments in each of which one small block stays
    streams      the same on two streams
    lengths      a transformer trained on sequences of random lengths
    graph        a captured CUDA graph's private pool beside eager work
    capped       churn that comes near to what the process may take (set_per_process_memory_fraction): retries, and
                 what `garbage_collection_threshold` gives back before

Needs torch, numpy and pandas; of dsprof what these are enough for.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent
KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
SETTINGS = (
    "", "expandable_segments:True", "roundup_power2_divisions:4", "roundup_power2_divisions:16",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", "max_split_size_mb:20", "max_split_size_mb:64",
    "max_split_size_mb:256", "max_split_size_mb:64,max_non_split_rounding_mb:40",
    "expandable_segments:True,roundup_power2_divisions:8", "garbage_collection_threshold:0.5",
    "garbage_collection_threshold:0.8,max_split_size_mb:128",
)  # fmt: skip
FROM = ("", "expandable_segments:True", "max_split_size_mb:64")
"""The settings whose histories all others are predicted from."""
CAPPED_BYTES = 2 * GiB
MOST_EVENTS = 400_000


# --- programs -------------------------------------------------------------------------------------


def block(size: int) -> Any:
    import torch

    return torch.empty(size, dtype=torch.uint8, device="cuda")


def churn(most_live: int = 3 * GiB, allocations: int = 4000, seed: int = 1) -> None:
    """Sizes are spread evenly over their logarithms, so most are small and large ones hold most of the bytes."""
    numbers = random.Random(seed)
    live: list[Any] = []
    held = 0
    for _ in range(allocations):
        size = int(512 * 2 ** numbers.uniform(0, 17))
        while live and (held + size > most_live or numbers.random() < 0.45):
            held -= live.pop(numbers.randrange(len(live))).numel()
        live.append(block(size))
        held += size


def growing() -> None:
    kept = []
    for step in range(60):
        held = [block((8 + step) * MiB + at * 300 * KiB) for at in range(6)]
        kept.append(block(600 * KiB))
        del held


def pinned() -> None:
    kept = []
    for step in range(40):
        whole = block(60 * MiB)
        del whole
        left = block(30 * MiB)
        kept.append(block(4 * MiB))
        right = block((24 + step % 3) * MiB)
        del left, right
        kept.append(block(50 * MiB))


def streams() -> None:
    import torch

    other = torch.cuda.Stream()
    for round_ in range(4):
        churn(GiB // 2, 500, seed=round_)
        with torch.cuda.stream(other):
            churn(GiB // 2, 500, seed=10 + round_)


def lengths() -> None:
    import torch

    torch.manual_seed(0)
    numbers = random.Random(3)
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(25):
        data = torch.randn(16, numbers.randrange(64, 1024), 512, device="cuda")
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def graph() -> None:
    import torch

    captured = torch.cuda.CUDAGraph()
    kept = [block(3 * MiB) for _ in range(5)]
    torch.cuda.synchronize()
    with torch.cuda.graph(captured):
        inside = [block((1 + at) * MiB) for at in range(12)]
        del inside[::2]
        inside += [block(2 * MiB + at * 512) for at in range(4)]
    captured.replay()
    churn(GiB // 2, 800, seed=7)
    del kept


def capped() -> None:
    churn(int(0.7 * CAPPED_BYTES), 3000, seed=5)


PROGRAMS: dict[str, Callable[[], None]] = {
    "churn": churn, "growing": growing, "pinned": pinned, "streams": streams, "lengths": lengths, "graph": graph,
    "capped": capped,
}  # fmt: skip


def run(program: str, output: Path) -> None:
    """In a process of its own: the program, its snapshot and what torch counted."""
    import torch

    if program == "capped":
        torch.cuda.set_per_process_memory_fraction(CAPPED_BYTES / torch.cuda.get_device_properties(0).total_memory)
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=MOST_EVENTS)
    failed = False
    try:
        PROGRAMS[program]()
    except torch.cuda.OutOfMemoryError:
        failed = True
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    counted = {
        "peak_reserved": stats["reserved_bytes.all.peak"], "reserved": stats["reserved_bytes.all.current"],
        "peak_active": stats["active_bytes.all.peak"], "retries": stats["num_alloc_retries"], "ooms": stats["num_ooms"],
        "device_allocs": stats["num_device_alloc"], "device_frees": stats["num_device_free"], "failed": failed,
    }  # fmt: skip
    with output.open("wb") as file:
        pickle.dump((counted, torch.cuda.memory._snapshot()), file)


# --- the twin -------------------------------------------------------------------------------------


def start(program: str, setting: str, output: Path) -> str:
    """Run it; what it said when it ended badly."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DSPROF", "PYTORCH_"))}
    if setting:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = setting
    command = [sys.executable, str(HERE), "--run", program, "--output", str(output)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return done.stderr[-2000:] if done.returncode else ""


def examine(files: dict[str, Path], capped_bytes: int | None) -> dict[str, Any]:
    """One program's runs, by setting."""
    from dsprof.analyzer.allocator import AllocatorSettings, Limits, Unplayable, prove, record, replay
    from dsprof.trace.snapshot import SnapshotTables

    limits = Limits(allowed_bytes=capped_bytes)
    found: dict[str, Any] = {}
    recordings, known = {}, {}
    for setting, file in files.items():
        counted, snapshot = pickle.loads(file.read_bytes())
        known[setting] = AllocatorSettings.of_snapshot(snapshot["allocator_settings"])
        one = found[setting or "default"] = {"measured": counted, "read_as": str(known[setting])}
        try:
            recording = record(SnapshotTables(file, 1 << 30).of(snapshot), 0, known[setting])
            proof = prove(recording, limits)
        except Unplayable as reason:
            one["exact"] = {"holds": False, "why": str(reason)}
            continue
        recordings[setting] = recording
        one["exact"] = {"holds": proof.holds, **vars(proof), "events": len(recording.events)}
    for setting in files:
        one = found[setting or "default"]
        one["predicted"] = {}
        for source in FROM:
            if source in recordings and setting in known:
                outcome = replay(recordings[source], known[setting], limits)
                one["predicted"][source or "default"] = {
                    "peak_reserved": outcome.peak_reserved, "reserved": outcome.reserved, "retries": outcome.retries,
                    "ooms": outcome.ooms, "device_calls": outcome.device_calls,
                    "error_percent": round(100 * (outcome.peak_reserved / one["measured"]["peak_reserved"] - 1), 3),
                }  # fmt: skip
    return found


def summary(programs: dict[str, Any]) -> dict[str, Any]:
    runs = [one for of in programs.values() for one in of.values()]
    guesses = [(one["measured"], guess) for one in runs for guess in one["predicted"].values()]
    errors = [abs(guess["error_percent"]) for _, guess in guesses]
    return {
        "runs": len(runs), "exact": sum(one["exact"]["holds"] for one in runs), "predictions": len(guesses),
        "peak_to_the_byte": sum(guess["peak_reserved"] == real["peak_reserved"] for real, guess in guesses),
        "device_calls_right": sum(
            guess["device_calls"] == real["device_allocs"] + real["device_frees"] for real, guess in guesses
        ),
        "retries_right": sum(guess["retries"] == real["retries"] for real, guess in guesses),
        "largest_error_percent": max(errors, default=None),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", choices=PROGRAMS, action="append")
    parser.add_argument("--processes", type=int, default=6, help="at a time, on the one GPU")
    parser.add_argument("--keep", type=Path, help="a folder for the snapshots")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run", choices=PROGRAMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run(args.run, args.output)
        return
    sys.path.insert(0, str(ROOT))
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA GPU here")
    name = torch.cuda.get_device_name()
    programs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(args.processes) as pool:
        chosen = args.program or list(PROGRAMS)
        files = {
            program: {setting: Path(scratch, f"{program}-{at}.pickle") for at, setting in enumerate(SETTINGS)}
            for program in chosen
        }
        started = {
            (program, setting): pool.submit(start, program, setting, file)
            for program, of in files.items()
            for setting, file in of.items()
        }
        for program, of in files.items():
            errors = {setting: error for setting in of if (error := started[program, setting].result())}
            for setting, error in errors.items():
                print(f"{program} under {setting or 'the default'} did not end well:\n{error}", flush=True)
            done = {setting: file for setting, file in of.items() if setting not in errors}
            programs[program] = examine(done, CAPPED_BYTES if program == "capped" else None)
            for (setting, one), file in zip(programs[program].items(), done.values(), strict=True):
                worst = max((abs(guess["error_percent"]) for guess in one["predicted"].values()), default=0)
                print(f"{program:8} {setting:50} exact {one['exact']['holds']!s:5} worst prediction {worst:.2f} %")
                if args.keep is not None:
                    args.keep.mkdir(parents=True, exist_ok=True)
                    (args.keep / file.name).write_bytes(file.read_bytes())
    whole = {
        "what": "the allocator twin against a GPU's allocator, program by program and setting by setting",
        "machine": {"device": name, "torch": torch.__version__, "python": platform.python_version()},
        "summary": summary(programs), "programs": programs,
    }  # fmt: skip
    slug = name.lower().replace("nvidia ", "").split()[0]
    output = args.output or ROOT / "benchmarks" / "results" / f"gpu-allocator-{slug}.json"
    output.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(whole["summary"]), output)


if __name__ == "__main__":
    main()
