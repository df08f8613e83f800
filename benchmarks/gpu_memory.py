"""Device memory under dsprof, on one GPU: what is sampled, the recorded history, and what comes of it.

    python benchmarks/gpu_memory.py        # some three minutes; writes benchmarks/results/gpu-memory-<name>.json
    python benchmarks/gpu_memory.py --scenario steady

Each scenario is a process of its own that trains under `DSPROF_LEVEL=full`, whose capture is merged and analyzed here:

    steady    a transformer's step, the same each time: nothing to find but what memory is for
    pinned    segments in each of which one small block is kept: memory.fragmentation, with the line that keeps it
    growing   blocks that grow with each step beside it: cached segments of sizes that no longer come
    leaking   a loss that is kept with its graph: memory.growth, with the line
    short     the card is capped, and a batch does not fit: memory.oom-risk, with the lines that held the memory

Checked of each: the samples are torch's own numbers; the allocator twin makes all recorded segments and addresses
(`proof`); the finding is there, names its line, and of `steady` there is none. Measured: what sampling and recording
take of a step, and that no call waits for the device (`torch.cuda.set_sync_debug_mode("error")` around every sample).
`held_out`: the setting that the twin names is tried on the card (PYTORCH_CUDA_ALLOC_CONF): reserved then, predicted and
measured.

Needs torch, numpy, pandas, pyarrow and scipy; of dsprof what these are enough for.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent
MiB, GiB = 1 << 20, 1 << 30
SCENARIOS = ("steady", "pinned", "growing", "leaking", "short")
EXPECTED = {
    "steady": None, "pinned": "memory.fragmentation", "growing": "memory.fragmentation", "leaking": "memory.growth",
    "short": "memory.oom-risk",
}  # fmt: skip
LINES = {"pinned": "KEEPS", "leaking": "MADE IN EACH STEP", "short": "ASKS FOR TOO MUCH"}
"""Of this file, one of which must be named."""


# --- what trains ----------------------------------------------------------------------------------


def train(scenario: str, steps: int, output: Path, small: bool) -> None:
    """In a process of its own, armed by the environment."""
    sys.path.insert(0, str(ROOT))
    import torch

    from dsprof.collectors.arm import autoload

    autoload()
    from dsprof.collectors.capture import session

    torch.use_deterministic_algorithms(True)  # attention's backward adds up in any order
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(0)
    device = torch.device("cuda")
    width, length, batch = (256, 128, 8) if small else (1024, 512, 16)
    layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    times, samples, losses, kept = [], [], [], []
    caught = 0
    for step in range(steps):
        began = time.perf_counter()
        data = torch.randn(batch, length, width, device=device)  # MADE IN EACH STEP
        try:
            loss = model(data).square().mean()
            loss.backward()
            if scenario == "leaking":
                kept.append((data * loss).sum() + loss)  # its graph holds the data
            if scenario == "pinned":
                pin(torch, device, kept, step)
            if scenario == "growing":
                held = [torch.empty((40 + 3 * step + at) * MiB, dtype=torch.uint8, device=device) for at in range(6)]
                del held
            if scenario == "short" and step == steps - 1:
                size = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() + GiB
                torch.empty(size, dtype=torch.uint8, device=device)  # ASKS FOR TOO MUCH
        except torch.cuda.OutOfMemoryError:
            caught += 1
        optimizer.step()
        losses.append(loss.item())
        stats = torch.cuda.memory_stats()
        samples.append(
            {"allocated": stats["allocated_bytes.all.current"], "reserved": stats["reserved_bytes.all.current"]}
        )
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    cost = sampling_cost(torch) if session.current() is not None else {}
    session.stop()
    output.write_text(json.dumps({
        "losses": losses, "samples": samples, "caught": caught, "step_ms": 1e3 * statistics.median(times), **cost,
        "peak_reserved": torch.cuda.memory_stats()["reserved_bytes.all.peak"], "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }))  # fmt: skip


def pin(torch: Any, device: Any, kept: list[Any], step: int) -> None:
    """A segment of 60 MiB of its own in each step, one block of which is kept when the rest is not."""
    first = torch.empty(60 * MiB, dtype=torch.uint8, device=device)
    del first
    left = torch.empty(30 * MiB, dtype=torch.uint8, device=device)
    kept.append(torch.empty(4 * MiB, dtype=torch.uint8, device=device))  # KEEPS A SMALL BLOCK
    right = torch.empty(26 * MiB, dtype=torch.uint8, device=device)
    del left, right
    kept.append(torch.empty(50 * MiB, dtype=torch.uint8, device=device))  # KEEPS A LARGE BLOCK


def sampling_cost(torch: Any) -> dict[str, Any]:
    """Of one sample, in microseconds, with an error for whatever would wait for the device."""
    from dsprof.collectors.capture import session

    current = session.current()
    hooks = [hook for hook in current._capture.after_step if "Sampler" in getattr(hook, "__qualname__", "")]
    assert len(hooks) == 1, "the memory collector is not there"
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    took = []
    try:
        for _ in range(200):
            began = time.perf_counter()
            hooks[0]()
            took.append(time.perf_counter() - began)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"sample_us": {"median": 1e6 * statistics.median(took), "p95": 1e6 * sorted(took)[190]}}


# --- what comes of it -----------------------------------------------------------------------------


def environment(run: Path | None, conf: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DSPROF", "PYTORCH_CUDA_ALLOC"))}
    kept["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    kept |= {"PYTORCH_CUDA_ALLOC_CONF": conf} if conf else {}
    if run is None:
        return {**kept, "DSPROF": "0"}
    return {**kept, "DSPROF": "1", "DSPROF_RUN": str(run), "DSPROF_LEVEL": "full"}


def job(scenario: str, args: argparse.Namespace, folder: Path, run: Path | None, conf: str = "") -> dict[str, Any]:
    output = folder / f"{scenario}-{'with' if run else 'without'}-{len(list(folder.iterdir()))}.json"
    if run is not None:
        run.mkdir()
    command = [sys.executable, str(HERE), "--train", scenario, "--steps", str(args.steps), "--output", str(output)]
    done = subprocess.run(
        command + (["--small"] if args.small else []), env=environment(run, conf), capture_output=True, text=True,
        timeout=400,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{scenario}: ended with {done.returncode}\n{done.stderr[-4000:]}")
    told: dict[str, Any] = json.loads(output.read_text())
    return told


def examine(scenario: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The scenario without and with dsprof, and everything that is checked of it."""
    from dsprof.analyzer import analyze
    from dsprof.analyzer.allocator import AllocatorSettings, devices, prove, record
    from dsprof.run import RunFolder
    from dsprof.trace import load

    run = folder / f"run-{scenario}"
    plain, with_it = job(scenario, args, folder, None), job(scenario, args, folder, run)
    trace = load(RunFolder(run))
    analysis = analyze(trace)
    settings = next((fact["settings"] for fact in trace.run.facts if fact["fact"] == "allocator"), {})
    proofs = []
    for memory in trace.memory.values():
        for device in devices(memory):
            recording = record(memory, device, AllocatorSettings.of_snapshot(settings))
            proof = prove(recording)
            proofs.append({**vars(proof), "holds": proof.holds, "events": len(recording.events),
                           "peak_reserved": recording.peak_reserved, "whole": recording.is_whole})  # fmt: skip
    found = [finding for finding in analysis.findings if finding.code.startswith("memory.")]
    result: dict[str, Any] = {
        "findings": [finding.to_dict() for finding in found],
        "not_judged": {code: why for code, why in analysis.not_judged.items() if code.startswith("memory.")},
        "memory_use": [use.to_dict() for use in analysis.memory_uses],
        "proofs": proofs,
        "warnings": list(analysis.capture.warnings),
        "step_ms": {"without": plain["step_ms"], "full": with_it["step_ms"]},
        "sample_us": with_it.get("sample_us"),
        "checks": {},
    }
    checks = result["checks"]
    checks["losses bit-identical"] = plain["losses"] == with_it["losses"]
    result["samples_apart"] = samples_apart(analysis.memory_steps, with_it["samples"])
    checks["samples are torch's numbers"] = result["samples_apart"] == []
    checks["the twin replays the history exactly"] = bool(proofs) and all(proof["holds"] for proof in proofs)
    checks["no errors in the collectors"] = not any("error inside" in text for text in analysis.capture.warnings)
    wanted = EXPECTED[scenario]
    above = [finding for finding in found if finding.severity != "info"]
    if wanted is None:  # how much its blocks fragment is the card's to say
        checks["no growth and no risk"] = all(finding.code == "memory.fragmentation" for finding in above)
    else:
        chosen = [finding for finding in found if finding.code == wanted]  # an info on a card with much left
        checks[f"{wanted} found"] = bool(chosen)
        if scenario in LINES:
            said = json.dumps([finding.to_dict() for finding in chosen])
            checks["its line is named"] = any(f"gpu_memory.py:{line}" in said for line in lines_of(LINES[scenario]))
    result["held_out"] = held_out(scenario, args, folder, found, with_it)
    return result


def samples_apart(table: Any, samples: list[dict[str, int]]) -> list[dict[str, Any]] | None:
    """Where what was sampled after a step is not what torch said then; None: nothing was sampled.

    The last step's sample is one of `sampling_cost`."""
    mine = table[table["place"] == "cuda.0"].set_index("step")
    compared = [step for step in range(len(samples) - 1) if step in mine.index]
    apart = [
        {"step": step, "name": name, "sampled": float(mine.loc[step, name]), "torch": samples[step][name]}
        for step in compared
        for name in ("allocated", "reserved")
        if mine.loc[step, name] != samples[step][name]
    ]
    return apart if compared else None


def lines_of(mark: str) -> list[int]:
    return [at for at, text in enumerate(HERE.read_text().splitlines(), 1) if f"# {mark}" in text]


def held_out(
    scenario: str, args: argparse.Namespace, folder: Path, found: list[Any], now: dict[str, Any]
) -> dict[str, Any] | None:
    """The fragmentation finding's setting, tried."""
    for finding in found:
        for fix in finding.fixes if finding.code == "memory.fragmentation" else ():
            if fix.kind != "env":
                continue
            value = fix.patch[0]["value"]
            tried = job(scenario, args, folder, None, value)
            expected = next((item.expected for item in finding.evidence if item.metric == "reserved at the peak"), None)
            return {"setting": value, "predicted": expected, "measured": tried["peak_reserved"],
                    "without": now["peak_reserved"]}  # fmt: skip
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=SCENARIOS, action="append")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--small", action="store_true", help="a model of toy size")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--train", choices=SCENARIOS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train, args.steps, args.output, args.small)
        return
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA GPU here")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for scenario in args.scenario or SCENARIOS:
            results[scenario] = examine(scenario, args, Path(scratch))
            print(scenario, json.dumps(results[scenario]["checks"]), flush=True)
    name = torch.cuda.get_device_name()
    whole = {
        "machine": {"device": name, "torch": torch.__version__, "python": platform.python_version()},
        "steps": args.steps, "small": args.small, "scenarios": results,
        "passed": all(all(of["checks"].values()) for of in results.values()),
    }  # fmt: skip
    slug = name.lower().replace("nvidia ", "").split()[0]
    output = args.output or ROOT / "benchmarks" / "results" / f"gpu-memory-{slug}.json"
    output.write_text(json.dumps(whole, indent=1, default=str).replace(f"{ROOT}/", "") + "\n")
    print(f"{'passed' if whole['passed'] else 'FAILED'}: {output}")
    sys.exit(0 if whole["passed"] else 1)


if __name__ == "__main__":
    main()
