"""`dsprof run --engine dsprof`: the stand-in for DeepSpeed is there when it is asked for and only then; the deepspeed
launcher's flags; the examples.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from jobs import ROOT, Finished, profile

from dsprof.cli import deepspeed_flags, main
from dsprof.collectors import arm
from dsprof.collectors.bootstrap.sitecustomize import StandIn
from dsprof.engine.config import ConfigError, load
from dsprof.engine.partition import partition, read_costs
from dsprof.engine.schedule import make_plan
from dsprof.launch import Job, Launch
from dsprof.launch.job import home
from dsprof.launch.launch import environment
from dsprof.run import RunFolder
from dsprof.settings import Settings

EXAMPLES = ROOT / "examples" / "deepspeed"

# --- by Python's start, with a dsprof made up for the purpose


OURS = """
import types
def check(name):
    pass
def make(name):
    print("ours")
    return types.ModuleType(name)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a `deepspeed` as if installed, and one beside it with a dsprof whose stand-in says its name."""
    write(tmp_path / "site" / "deepspeed" / "__init__.py", "print('theirs')")
    write(tmp_path / "site" / "deepspeed" / "comm.py", "print('theirs')")
    write(tmp_path / "home" / "dsprof" / "__init__.py", "")
    write(tmp_path / "home" / "dsprof" / "engine" / "__init__.py", "")
    write(tmp_path / "home" / "dsprof" / "engine" / "deepspeed.py", OURS)
    return tmp_path / "site"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def python(site: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    bootstrap = home() / "dsprof" / "collectors" / "bootstrap"
    env = {"PYTHONPATH": f"{bootstrap}:{site}", "DSPROF_HOME": str(site.parent / "home"), **variables}
    base = sys._base_executable  # type: ignore[attr-defined]
    return subprocess.run([base, *words], env=env, cwd=site, capture_output=True, text=True, timeout=60)


TWICE = "import deepspeed, deepspeed.comm"


def test_it_takes_the_place_of_an_installed_one_where_asked_for(site: Path) -> None:
    done = python(site, "-c", TWICE, DSPROF_ENGINE="dsprof")
    assert (done.stdout.split(), done.stderr) == (["ours", "ours"], "")


@pytest.mark.parametrize("value", ["", "script", "0"])
def test_an_installed_one_stays_where_it_is_not_asked_for(site: Path, value: str) -> None:
    assert python(site, "-c", TWICE, DSPROF_ENGINE=value, DSPROF="1").stdout.split() == ["theirs", "theirs"]


def test_it_is_there_for_modules_and_for_processes_that_are_spawned(site: Path) -> None:
    code = """
import multiprocessing
def child():
    import deepspeed
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    child()
"""
    write(site / "pkg" / "train.py", code)
    assert python(site, "-m", "pkg.train", DSPROF_ENGINE="dsprof").stdout.split() == ["ours", "ours"]


def test_the_installed_one_does_not_run_where_the_stand_in_cannot(site: Path) -> None:
    done = python(site, "-c", TWICE, DSPROF_ENGINE="dsprof", DSPROF_HOME="/nowhere")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "--engine dsprof: deepspeed stands for dsprof's engine, which" in done.stderr
    assert "cannot import (No module named 'dsprof'); install dsprof there" in done.stderr


def test_torchs_entry_point_puts_it_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv("DSPROF", "0")
    arm.autoload()
    assert not any(isinstance(finder, StandIn) for finder in sys.meta_path)
    monkeypatch.setenv("DSPROF_ENGINE", "dsprof")
    arm.autoload()
    arm.autoload()
    assert [isinstance(finder, StandIn) for finder in sys.meta_path[:2]] == [True, False]


def test_a_job_that_has_the_other_one_already_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setenv("DSPROF_ENGINE", "dsprof")
    with pytest.raises(RuntimeError, match="DeepSpeed itself was imported before dsprof could stand in for it"):
        arm.autoload()


# --- the command line


def test_the_engine_is_a_setting_like_others(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    main(["run", "train.py"])
    main(["run", "--engine", "dsprof", "train.py"])
    Path("pyproject.toml").write_text('[tool.dsprof]\nengine = "dsprof"\n')
    main(["run", "train.py"])
    monkeypatch.setenv("DSPROF_ENGINE", "script")
    main(["run", "train.py"])
    main(["run", "--engine=dsprof", "--", "srun", "python", "train.py"])
    assert [launch.settings.engine for launch in launched] == ["script", "dsprof", "dsprof", "script", "dsprof"]


def test_the_ranks_are_told_by_the_environment(tmp_path: Path) -> None:
    base = {"DSPROF_ENGINE": "dsprof", "PYTHONPATH": "/mine"}
    folder = RunFolder(tmp_path)
    ours = environment(base, folder, Settings(engine="dsprof"), bootstrap=True)
    assert ours["DSPROF_ENGINE"] == "dsprof"
    assert ours["PYTHONPATH"].endswith("/dsprof/collectors/bootstrap:/mine")
    assert "DSPROF_ENGINE" not in environment(base, folder, Settings(), bootstrap=False)


@pytest.mark.parametrize(
    ("flags", "passed", "local_rank"),
    [
        ("--num_gpus 2", ("--nproc-per-node=2", "--standalone"), True),
        ("--num-gpus=2 --no_local_rank", ("--nproc-per-node=2", "--standalone"), False),
        ("--num_accelerators 3 --num_nodes 1", ("--nproc-per-node=3", "--standalone"), True),
        ("--num_gpus -1", ("--nproc-per-node=1", "--standalone"), True),
        ("--num_gpus 2 --nproc_per_node 2", ("--nproc-per-node=2", "--standalone"), True),
        ("--num_gpus 2 --master_port 29501", ("--nproc-per-node=2", "--master-port=29501"), True),
        ("--nproc-per-node 2", ("--nproc-per-node=2", "--standalone"), False),
        ("--no_local_rank", ("--nproc-per-node=1", "--standalone"), False),
    ],
)
def test_the_launchers_flags_in_torchruns_words(
    launched: list[Launch], flags: str, passed: tuple[str, ...], local_rank: bool
) -> None:
    assert main(["run", *flags.split(), "train.py", "--num_gpus", "7"]) == 0
    job = launched[0].job
    assert (job.torchrun_flags, job.local_rank) == (passed, local_rank)
    assert job.words == ("train.py", "--num_gpus", "7")
    main(["run", *flags.split(), "--module", "pkg.train"])
    assert (launched[1].job.words, launched[1].job.local_rank) == (("-m", "pkg.train"), local_rank)


@pytest.mark.parametrize(
    ("words", "after"),
    [
        (("train.py", "-x"), ["--", "train.py", "--local_rank=${local_rank}", "-x"]),
        (("-m", "pkg.train", "-x"), ["--", "-m", "pkg.train", "--local_rank=${local_rank}", "-x"]),
    ],
)
def test_the_script_is_handed_its_local_rank_first(tmp_path: Path, words: tuple[str, ...], after: list[str]) -> None:
    job = Job(words, torchrun_flags=(), local_rank=True)
    assert job.command(RunFolder(tmp_path), installed=True)[-len(after) :] == after


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--hostfile hosts", "--hostfile: dsprof run starts the ranks of this machine"),
        ("-H hosts", "--hostfile: dsprof run starts the ranks of this machine"),
        ("--include localhost:0,1", "--include: put CUDA_VISIBLE_DEVICES=0,1"),
        ("-e localhost:0", "--exclude: put CUDA_VISIBLE_DEVICES=0,1"),
        ("--num_nodes 2", "--num-nodes 2: dsprof run starts the ranks of this machine"),
        ("--launcher openmpi", "--launcher: torchrun starts the ranks here"),
        ("--deepspeed_config ds.json", "write it after the script: dsprof run train.py --deepspeed_config FILE"),
        ("--deepspeed", "write it after the script: dsprof run train.py --deepspeed"),
        ("--enable_each_rank_log logs", "write --log-dir DIR --redirects 3"),
        ("--autotuning tune", "try values one by one"),
        ("--num_gpus 0", "--num-gpus 0: write a number of ranks, at least 1"),
        ("--num_gpus two", "--num-gpus two: write a number of ranks, at least 1"),
        ("--num_gpus 2 --nproc-per-node 3", "--num-gpus and --nproc-per-node: write one of them"),
        ("--engine deepspeed", "'deepspeed' is not one of 'script', 'dsprof'"),
    ],
)
def test_other_flags_of_the_launcher_cost_one_line(
    launched: list[Launch], capsys: pytest.CaptureFixture[str], flags: str, says: str
) -> None:
    assert main(["run", *flags.split(), "train.py"]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert launched == []


def test_a_command_brings_its_own_flags(launched: list[Launch], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--num_gpus", "2", "--", "python", "train.py"]) == 2
    assert "--num-gpus: a flag of the deepspeed launcher" in capsys.readouterr().err


def test_the_launchers_flags_are_all_known() -> None:
    """Of DeepSpeed 0.19.8's `deepspeed --help`."""
    theirs = {
        "hostfile", "include", "exclude", "num_nodes", "num_gpus", "num_accelerators", "master_port", "master_addr",
        "node_rank", "launcher", "launcher_args", "module", "no_python", "no_local_rank", "no_ssh", "no_ssh_check",
        "force_multi", "save_pid", "enable_each_rank_log", "autotuning", "bind_cores_to_rank", "bind_core_list",
        "ssh_port", "venv_script", "log_level", "quiet",
    }  # fmt: skip
    ours = {name for flag in deepspeed_flags.FLAGS for name in (flag.option, *flag.more)}
    torchruns = {"master_port", "master_addr", "node_rank", "module", "no_python"}
    assert {"--" + name.replace("_", "-") for name in theirs - torchruns - {"quiet"}} <= ours


def test_help_shows_what_is_understood(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--engine" in text
    assert "--num-gpus" in text
    assert "--hostfile" not in text


# --- real jobs


FLAGS = ("--engine", "dsprof", "--num_gpus", "2", "--no-report")


EXAMPLES_RUN = ("zero2_offload", "tensor_parallel", "pipeline")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Finished, Path]]:
    """A script that looks around and then runs the examples, in one job: before the engine stands in for DeepSpeed no
    torch may be imported, so each rank is an interpreter of its own. A `deepspeed` that ends whoever imports it is on
    every process' path. Returns where it ran, too."""
    folder = tmp_path_factory.mktemp("job")
    write(folder / "theirs" / "deepspeed" / "__init__.py", "raise SystemExit('this is DeepSpeed itself')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder / 'theirs'}:{ROOT / 'tests'}")
        yield profile(folder, Path("-m"), "deepspeed_job", "look", *EXAMPLES_RUN, flags=FLAGS), folder


def test_a_script_runs_on_the_engine_in_every_process(job: tuple[Finished, Path]) -> None:
    done, _ = job
    assert done.status == 0, done.stderr
    assert done.folder.read_info().engine == "dsprof"
    assert "[dsprof] engine: dsprof, where the script imports deepspeed\n" in done.stderr
    assert done.findings["run"]["ranks"] == {"expected": 2, "captured": 2}
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    found = json.loads(line.removeprefix("found "))
    assert found.pop("no engine") == "log_summary: there is no engine yet; call deepspeed.initialize first"
    assert found.pop("mpu").startswith("initialize: by mpu this rank is number 0 of 2 that share each layer")
    assert found == {
        "local rank": True,
        "worker": "0.19.8+dsprof",
        "cut": [True, True],
        "pieces": [16, 16, "AVAILABLE"],
        "shape": [[4, 8], 32],
        "status": ["NOT_AVAILABLE", "AVAILABLE"],
        "whole": True,
    }
    assert "reduce_scatter" in done.stdout  # the summary of communications


def losses(done: Finished, example: str) -> list[float]:
    """What an example printed of its loss."""
    mine = done.stdout.partition(f"example {example}\n")[2].partition("example ")[0]
    lines = [line.replace("=", ": ") for line in mine.splitlines() if "loss" in line]
    return [float(line.partition("loss: ")[2].split()[0]) for line in lines]


def test_the_examples_train(job: tuple[Finished, Path]) -> None:
    done, folder = job
    assert done.status == 0, done.stderr
    for example in EXAMPLES_RUN:
        first, *_, last = losses(done, example)
        assert last < 0.8 * first, example
    assert list((folder / "output" / "ds_logs").rglob("events.out.tfevents.*"))

    # The pipeline ran last: each of its steps is in the trace as its plan has it, action by action.
    plan = make_plan("1f1b", 2, 8)
    rows = done.analysis().rows
    pipe = rows[rows["kind"] == "pipe"].sort_values("start_ns")
    for rank in range(2):
        mine = pipe[pipe["rank"] == rank]
        steps = [step for _, step in mine.groupby("step")]
        assert len(steps) == 40
        for step in steps:
            assert list(zip(step["name"], step["stage"], step["microbatch"], strict=True)) == list(plan.actions[rank])
    moved = rows[(rows["kind"] == "comm") & rows["peer"].notna() & (rows["purpose"] == "pipeline")]
    assert moved.groupby(["rank", "name"], observed=True).size().to_dict() == {
        (rank, name): 40 * 8 for rank in range(2) for name in ("send", "recv")
    }
    assert done.findings["budget"]["bubble"] > 0

    # What its layers took is there to divide them by.
    names = [str(number) for number in range(12)]
    costs = read_costs(done.folder.layer_costs_json, names)
    assert all(cost > 0 for cost in costs)
    assert max(costs[:4]) > max(costs[8:])  # convolutions of pictures, against small linear layers
    assert partition("measured", 2, names, costs=costs)[1] < 7


@pytest.mark.parametrize(
    ("example", "ranks", "says"),
    [
        ("zero2_offload", 1, "train_batch_size: 32 is not .*_gpu 8 x .*_steps 2 x 1 data-parallel rank = 16"),
        ("zero2_offload", 4, "train_batch_size: 32 is not .*_gpu 8 x .*_steps 2 x 4 data-parallel ranks = 64"),
        ("tensor_parallel", 4, "train_batch_size: 8 is not .*_gpu 8 x .*_steps 1 x 2 data-parallel ranks = 16"),
    ],
)
def test_at_another_world_size_all_four_numbers_are_told(example: str, ranks: int, says: str) -> None:
    load(EXAMPLES / f"{example}.json", world_size=2)
    with pytest.raises(ConfigError, match=says):
        load(EXAMPLES / f"{example}.json", world_size=ranks)
