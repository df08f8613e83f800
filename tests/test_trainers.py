"""Trainers of other people, run as they say: the same losses under `dsprof run`, their steps, and a true verdict.

Each needs packages of the `trainers` extra and is skipped without them. Weights are random, data generated, and nothing
is fetched.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from jobs import ABORTED, Finished, environment

from dsprof.run import RunFolder
from dsprof.trace import load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

JOBS = Path(__file__).parent / "trainer_jobs"
LANGUAGE, SHAPES = "LANGUAGE", "SHAPES"
"""In a command: the folder that the script of that name fills."""
FOLDER = "FOLDER"
"""In a command: where the job runs."""
TRL = "TRL"
"""In a command: where TRL keeps its scripts."""
FOUND_ON_A_BUSY_MACHINE = {"pause.stop", "data.stall", "checkpoint.stall"}
"""True of any of these jobs where cores are short, and a checkpoint or a start of workers takes long."""

Losses = Callable[[Path], list[object]]


def written(folder: Path) -> list[object]:
    """Of a job that writes them itself: `losses.<rank>.json`."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("losses.*.json"))]


def logged(folder: Path) -> list[object]:
    """What Transformers' Trainer keeps with its last checkpoint."""
    states = folder.rglob("trainer_state.json")
    last = max((json.loads(path.read_text()) for path in states), key=lambda state: int(state["global_step"]))
    names = ("step", "loss", "grad_norm", "eval_loss")
    return [[entry.get(name) for name in names] for entry in last["log_history"]]


def columns(name: str) -> Losses:
    """Of a table that the trainer leaves: the columns with a loss."""

    def read(folder: Path) -> list[object]:
        (path,) = folder.rglob(name)
        with path.open() as file:
            return [{key: value for key, value in row.items() if "loss" in key} for row in csv.DictReader(file)]

    return read


@dataclass(frozen=True)
class Trainer:
    """needs: packages
    command:  after `dsprof run`; without us after Python or torchrun, or by itself where it begins with `--`
    steps:    how many it takes, of the optimizer
    losses:   where it leaves them
    launched: how many ranks torchrun starts; None: it is started as it is, and may start ranks itself
    ranks:    how many there are
    """

    needs: tuple[str, ...]
    command: tuple[str, ...]
    steps: int
    losses: Losses = written
    launched: int | None = None
    ranks: int = 1


HF = (
    "--use_cpu", "--bf16", "False", "--model_name_or_path", f"{LANGUAGE}/model", "--output_dir", "saved",
    "--max_steps", "40", "--gradient_accumulation_steps", "2", "--eval_strategy", "steps", "--eval_steps", "20",
    "--save_steps", "20", "--logging_steps", "1", "--report_to", "none", "--disable_tqdm", "True",
)  # fmt: skip
TRAINERS = {
    "TRL, SFT with PEFT, its own command": Trainer(
        ("trl", "peft", "datasets"),
        (
            "--", "trl", "sft", "--cpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
            "--dynamo_backend", "no", *HF, "--dataset_name", f"{LANGUAGE}/texts", "--per_device_train_batch_size", "4",
            "--use_peft", "--lora_r", "8",
        ),
        40, logged,
    ),
    "TRL, DPO, 2 ranks": Trainer(
        ("trl", "datasets"),
        (
            f"{TRL}/dpo.py", *HF, "--dataset_name", f"{LANGUAGE}/preferences", "--per_device_train_batch_size", "2",
        ),
        40, logged, launched=2, ranks=2,
    ),
    "ultralytics": Trainer(
        ("ultralytics", "torchvision"),
        (
            "--", "yolo", "train", "model=yolo11n.yaml", f"data={SHAPES}/data.yaml", "epochs=4", "imgsz=64", "batch=8",
            "nbs=8", "device=cpu", f"project={FOLDER}", "name=saved", "plots=False", "seed=0",
        ),
        80, columns("results.csv"),
    ),
    "litgpt": Trainer(
        ("litgpt",),
        (
            "--", "litgpt", "pretrain", "pythia-14m", "--data", "litgpt_words.Words", "--train.max_seq_length", "32",
            "--train.global_batch_size", "8", "--train.micro_batch_size", "4", "--train.max_tokens", "7680",
            "--train.lr_warmup_steps", "5", "--eval.interval", "10", "--eval.max_iters", "4",
            "--train.save_interval", "10", "--out_dir", "saved", "--logger_name", "csv", "--devices", "1",
        ),
        30, columns("metrics.csv"),
    ),
    "sentence-transformers, 2 ranks": Trainer(
        ("sentence_transformers", "datasets"), (f"{JOBS}/sentence_pairs.py", LANGUAGE), 40, logged, launched=2, ranks=2
    ),
    "ignite, which starts its 2 ranks": Trainer(("ignite",), (f"{JOBS}/ignite_spawn.py",), 100, ranks=2),
    "diffusers, by accelerate launch": Trainer(
        ("diffusers", "accelerate"),
        ("--", sys.executable, "-m", "accelerate.commands.launch", "--cpu", f"{JOBS}/diffusion.py"),
        120,
    ),
    "stable-baselines3": Trainer(("stable_baselines3",), (f"{JOBS}/reinforcement.py",), 96),
    "fastai": Trainer(("fastai",), (f"{JOBS}/fastai_learner.py",), 120),
}  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Puts generated folders, made when first asked for, in the place of their names."""
    made: dict[str, Path] = {}

    def put(word: str) -> str:
        for name, script in ((LANGUAGE, "make_language.py"), (SHAPES, "make_shapes.py")):
            if name in word and name not in made:
                made[name] = tmp_path_factory.mktemp(name.lower())
                command = [sys.executable, str(JOBS / script), str(made[name])]
                subprocess.run(command, env=alone(made[name]), check=True, capture_output=True, timeout=120)
            word = word.replace(name, str(made.get(name, "")))
        if TRL in word:
            found = importlib.util.find_spec("trl")
            assert found is not None
            assert found.origin is not None
            word = word.replace(TRL, str(Path(found.origin).parent / "scripts"))
        return word

    return put


def alone(folder: Path) -> dict[str, str]:
    """The environment: no hub, one thread, settings of theirs in `folder`, our data to be imported."""
    paths = [str(JOBS), *filter(None, [os.environ.get("PYTHONPATH")])]
    commands = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return environment(
        HF_HUB_OFFLINE="1", YOLO_OFFLINE="true", YOLO_CONFIG_DIR=str(folder), OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join(paths), PATH=os.pathsep.join(commands), PYTHONWARNINGS="ignore",
    )  # fmt: skip


def run(name: str, folder: Path, places: Callable[[str], str], *more: str, profiled: bool = True) -> Finished:
    trainer = TRAINERS[name]
    for package in trainer.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    command = [places(word).replace(FOLDER, str(folder)) for word in trainer.command] + list(more)
    ranks = [] if trainer.launched is None else ["--nproc-per-node", str(trainer.launched)]
    python = [sys.executable, "-m"]
    if profiled:
        start = [*python, "dsprof", "run", "-o", "run", "--force", "--no-report", *ranks]
    elif command[0] == "--":
        start, command = [], command[1:]
    else:
        start = [*python, "torch.distributed.run", *ranks] if ranks else [sys.executable]
    for _ in range(3):
        done = subprocess.run(
            [*start, *command], cwd=folder, env=alone(folder), capture_output=True, text=True, timeout=400
        )
        if ABORTED not in done.stderr:
            break
    return Finished(RunFolder(folder / "run"), done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("name", TRAINERS)
def test_it_trains_as_without_us_and_nothing_false_is_said(
    name: str, tmp_path: Path, places: Callable[[str], str]
) -> None:
    trainer = TRAINERS[name]
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    plain.mkdir()
    watched.mkdir()
    without = run(name, plain, places, profiled=False)
    assert without.status == 0, without.stderr
    done = run(name, watched, places)
    assert done.status == 0, done.stderr
    losses = trainer.losses(plain)
    assert losses
    assert trainer.losses(watched) == losses
    info = done.folder.read_info()
    assert [rank.errors for rank in info.ranks] == [0] * trainer.ranks
    for rank in range(trainer.ranks):
        rows = load(done.folder).read(rank)
        assert int((rows["kind"] == "step").sum()) == trainer.steps
        assert "checkpoint" in set(rows.loc[rows["kind"] == "phase", "name"]) or rank
    assert done.findings["verdict"]["status"] != "failed"
    assert set(done.above_info) <= FOUND_ON_A_BUSY_MACHINE
    hidden = name == "TRL, DPO, 2 ranks"  # the reference model's forwards are without gradients too
    assert done.findings["time"]["evaluation"] > 0 or hidden


PLANTED = {
    "a slow rank under sentence-transformers": (
        "sentence-transformers, 2 ranks", ("--slow-rank", "1"), "rank.straggler",
    ),
    "a slow rank under ignite": ("ignite, which starts its 2 ranks", ("--slow-rank", "1"), "rank.straggler"),
    "slow samples under litgpt": ("litgpt", ("--data.seconds", "0.1"), "data.stall"),
    "slow samples under fastai": ("fastai", ("--seconds", "0.005"), "data.stall"),
    "checkpoints all the time under Accelerate": (
        "diffusers, by accelerate launch", ("--save-every", "3"), "checkpoint.stall",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found_and_nothing_else_accused(
    fault: str, tmp_path: Path, places: Callable[[str], str]
) -> None:
    name, more, code = PLANTED[fault]
    done = run(name, tmp_path, places, *more)
    assert done.status == 0, done.stderr
    assert code in done.above_info
    assert set(done.above_info) <= {code} | FOUND_ON_A_BUSY_MACHINE
    if code == "rank.straggler":
        (finding,) = [finding for finding in done.findings["findings"] if finding["code"] == code]
        assert finding["where"]["ranks"] == [1]


def test_playing_that_takes_most_of_the_time_is_named(tmp_path: Path, places: Callable[[str], str]) -> None:
    done = run("stable-baselines3", tmp_path, places, "--seconds", "0.01")
    assert done.status == 0, done.stderr
    assert "evaluating, playing or sampling" in done.findings["verdict"]["headline"]


def test_what_a_package_makes_is_not_looked_for_in_its_command(tmp_path: Path, places: Callable[[str], str]) -> None:
    """`yolo` is a script of three lines in `bin`."""
    done = run("ultralytics", tmp_path, places)
    facts = [fact for fact in done.folder.read_info().facts if fact["fact"] in ("dataloader", "checkpoint")]
    assert {fact["fact"] for fact in facts} == {"dataloader", "checkpoint"}
    assert all("/ultralytics/" in fact["site"] for fact in facts)
