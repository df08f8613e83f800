"""The engine on GPUs, against one process on the CPU: ZeRO, pipelines, tensor parallelism, offload, checkpoints and a
rank that fails. With NCCL on two devices, or with gloo on one that two ranks share.

Every rank is a process of its own, and this one never touches CUDA. Skipped where there are no devices.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

JOB = Path(__file__).parent / "job.py"
TIMEOUT_S = 300


def visible() -> int:
    """Devices there are, counted in another process: this one stays without CUDA."""
    count = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, check=True).stdout)


@pytest.fixture(scope="session")
def devices() -> int:
    return visible()


@pytest.fixture(params=["nccl", "gloo"])
def backend(request: pytest.FixtureRequest, devices: int) -> str:
    """NCCL takes a device for each of the two ranks; gloo takes one for both."""
    name = str(request.param)
    needed = 2 if name == "nccl" else 1
    if devices < needed:
        pytest.skip(f"{needed} GPU{'s' if needed > 1 else ''} wanted with {name}, and there are {devices}")
    return name


def run(folder: Path, backend: str, ranks: int, *, gpu: bool, **asked: Any) -> list[tuple[int, str]]:
    """Status and standard error of each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if not gpu:
        env["CUDA_VISIBLE_DEVICES"] = ""
    elif backend == "gloo":
        env["CUDA_VISIBLE_DEVICES"] = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    processes = [
        subprocess.Popen(
            [sys.executable, str(JOB), json.dumps({"backend": backend, **asked})], cwd=folder,
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=TIMEOUT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / "weights.bin", map_location="cpu", weights_only=True)
    return found


def configuration(**more: Any) -> dict[str, Any]:
    """A step is of eight samples, whatever the ranks."""
    return {
        "train_batch_size": 8,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        **more,
    }


def zero(stage: int, **more: Any) -> dict[str, Any]:
    small = {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    return {"zero_optimization": {"stage": stage, **(small if stage == 3 else {}), **more}}


def check(folder: Path, backend: str, config: dict[str, Any], *, gpu: bool = True, **asked: Any) -> None:
    """Two ranks train to what one process does."""
    asked = {"model": "plain", **asked}
    steps = {"gradient_accumulation_steps": 4} if asked["model"] == "pipeline" else {}
    alone = {"model": asked["model"], "config": configuration(**steps)}
    assert [status for status, _ in run(folder / "one", "gloo", 1, gpu=False, **alone)] == [0]
    ended = run(folder / "two", backend, 2, gpu=gpu, config=configuration(**steps, **config), **asked)
    assert [status for status, _ in ended] == [0, 0], "\n".join(text for _, text in ended)
    expected, found = weights(folder / "one"), weights(folder / "two")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name].float(), value.float(), atol=1e-4), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_trains_as_one_process(tmp_path: Path, backend: str, stage: int) -> None:
    check(tmp_path, backend, zero(stage))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_pipeline_trains_as_one_process(tmp_path: Path, backend: str, schedule: str) -> None:
    check(tmp_path, backend, {"pipeline": {"stages": 2, "schedule": schedule}}, model="pipeline")


def test_tensor_parallel_ranks_train_as_one_process(tmp_path: Path, backend: str) -> None:
    check(tmp_path, backend, {"tensor_parallel": {"autotp_size": 2}})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_on_the_host_trains_as_one_process(tmp_path: Path, backend: str, stage: int) -> None:
    check(tmp_path, backend, zero(stage, offload_optimizer={"device": "cpu", "pin_memory": True}))


def test_parameters_on_the_host_train_as_one_process(tmp_path: Path, backend: str) -> None:
    check(tmp_path, backend, zero(3, offload_param={"device": "cpu", "pin_memory": True}))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_training_goes_on_from_a_checkpoint(tmp_path: Path, backend: str, stage: int) -> None:
    check(tmp_path, backend, zero(stage), resumed=True)


def test_a_rank_that_fails_ends_the_job(tmp_path: Path, backend: str) -> None:
    """In a pipeline the other one is waiting for it."""
    config = configuration(gradient_accumulation_steps=4, pipeline={"stages": 2})
    (one, _), (other, said) = run(tmp_path, backend, 2, gpu=True, model="pipeline", config=config, fails=1)
    assert one != 0
    assert other != 0
    assert "ArithmeticError: this rank fails" in said
