"""`dsprof run`'s command line: where dsprof's flags end, what it refuses, and where settings come from."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import launcher
import pytest

from dsprof import settings
from dsprof.cli import main, torchrun_flags
from dsprof.cli import run as cli_run
from dsprof.cli.split import split_at_job
from dsprof.launch import Job, Launch, LaunchError
from dsprof.launch.devices import count_visible
from dsprof.run import RunFolder
from dsprof.settings import Settings, SettingsError

NEWER_THAN_TORCH_2_11 = {"--shutdown-timeout"}
TAKES_VALUE = {"--output": True, "-o": True, "-q": False, "--nproc-per-node": True, "--force": False, "-r": True}


@pytest.mark.parametrize(
    ("line", "job"),
    [
        ("train.py --lr 3", "train.py --lr 3"),
        ("-q train.py -q", "train.py -q"),
        ("-o out train.py", "train.py"),
        ("-oout train.py", "train.py"),
        ("-qo out train.py", "train.py"),
        ("--output=out train.py", "train.py"),
        ("--nproc_per_node 2 train.py", "train.py"),
        ("--nproc_per_node=2 train.py", "train.py"),
        ("-r 3 -m pkg.train -q", "-m pkg.train -q"),
        ("-mpkg.train -q", "-mpkg.train -q"),
        ("--force -- srun -q", "-- srun -q"),
        ("-o -- train.py", "train.py"),
        ("srun python", "srun python"),
        ("--unknown 3 train.py", ""),
        ("-z train.py", ""),
        ("-q", ""),
        ("", ""),
    ],
)
def test_dsprofs_flags_end_at_the_job(line: str, job: str) -> None:
    words = line.split()
    assert words[split_at_job(words, TAKES_VALUE) :] == job.split()


@pytest.mark.parametrize(
    ("line", "words", "is_command"),
    [
        ("train.py -o foo --help -- -x", ("train.py", "-o", "foo", "--help", "--", "-x"), False),
        ("train.py -- -x", ("train.py", "--", "-x"), False),
        ("-m pkg.train -m x", ("-m", "pkg.train", "-m", "x"), False),
        ("--module pkg.train", ("-m", "pkg.train"), False),
        ("-mpkg.train --help", ("-m", "pkg.train", "--help"), False),
        ("-- train.py -- -x", ("train.py", "--", "-x"), False),
        ("-- -m pkg.train", ("-m", "pkg.train"), False),
        ("-- srun -n 2 python train.py", ("srun", "-n", "2", "python", "train.py"), True),
        ("-- python train.py --", ("python", "train.py", "--"), True),
    ],
)
def test_the_job_arrives_word_for_word(
    launched: list[Launch], line: str, words: tuple[str, ...], is_command: bool
) -> None:
    assert main(["run", *line.split()]) == 0
    assert (launched[0].job.words, launched[0].job.is_command) == (words, is_command)
    assert launched[0].typed == ("dsprof", "run", *line.split())


def test_odd_bytes_in_the_jobs_words_survive(launched: list[Launch]) -> None:
    odd = ["", " ", "a b", "--x=é", os.fsdecode(b"\xff\xfe"), "@file", "%s", "\n", "-"]
    main(["run", "train.py", *odd])
    assert launched[0].job.words == ("train.py", *odd)


@pytest.mark.parametrize("spelling", ["--nproc-per-node", "--nproc_per_node"])
@pytest.mark.parametrize("joint", [" ", "="])
def test_torchruns_flags_in_both_spellings(launched: list[Launch], spelling: str, joint: str) -> None:
    main(["run", *f"{spelling}{joint}3 --max_restarts 2 --virtual-local-rank train.py".split()])
    job = launched[0].job
    assert job.torchrun_flags == ("--nproc-per-node=3", "--standalone", "--max-restarts=2", "--virtual-local-rank")
    assert job.world_size == 3


@pytest.mark.parametrize(
    ("flags", "passed", "world_size"),
    [
        ("--max-restarts 1", ("--nproc-per-node=1", "--standalone", "--max-restarts=1"), 1),
        ("--nnodes 2 --nproc-per-node 4", ("--nproc-per-node=4", "--nnodes=2"), 8),
        ("--nnodes 1:4 --nproc-per-node 4", ("--nproc-per-node=4", "--nnodes=1:4"), None),
        ("--nproc-per-node gpu", ("--nproc-per-node=gpu", "--standalone"), None),
        ("--master-port 29501", ("--nproc-per-node=1", "--master-port=29501"), 1),
        ("--rdzv-backend c10d", ("--nproc-per-node=1", "--rdzv-backend=c10d"), 1),
        ("--standalone", ("--nproc-per-node=1", "--standalone"), 1),
    ],
)
def test_defaults_of_torchruns_flags(
    launched: list[Launch], flags: str, passed: tuple[str, ...], world_size: int | None
) -> None:
    main(["run", *flags.split(), "train.py"])
    assert (launched[0].job.torchrun_flags, launched[0].job.world_size) == (passed, world_size)


def test_torchruns_environment_counts_as_given(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "5")
    monkeypatch.setenv("PET_NNODES", "2")
    main(["run", "--role", "trainer", "train.py"])
    assert (launched[0].job.torchrun_flags, launched[0].job.world_size) == (("--role=trainer",), None)


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("", None),
        ("-q --ranks 0 --native off --no-report --engine script", None),
        ("--nproc-per-node 1", 1),
        ("--nproc_per_node=1", 1),
        ("--standalone", 1),
        ("--engine dsprof", 1),
        ("--num_gpus 3", 3),
        ("--no_local_rank", 1),
    ],
)
def test_only_a_launchers_flag_makes_ranks(
    launched: list[Launch], monkeypatch: pytest.MonkeyPatch, flags: str, ranks: int | None
) -> None:
    monkeypatch.setenv("PET_ROLE", "trainer")  # which is no flag
    for job in ("train.py --nproc-per-node 2", "-m pkg.train --standalone"):
        assert main(["run", *flags.split(), *job.split()]) == 0
        started = launched.pop().job
        assert (started.has_ranks, started.world_size) == (ranks is not None, ranks)
        if ranks is None:
            assert started.command(RunFolder(Path("/a")), installed=True) == [sys.executable, *job.split()]


@pytest.mark.parametrize("line", ["-- train.py", "-- -m pkg.train"])
def test_a_script_after_the_dashes_is_one_process_too(launched: list[Launch], line: str) -> None:
    main(["run", *line.split()])
    assert launched[0].job.command(RunFolder(Path("/a")), installed=True) == [sys.executable, *line.split()[1:]]


def test_our_own_flags_stay_in_a_line_that_is_advised(launched: list[Launch]) -> None:
    line = "-o out --level light --ranks 0-3 --native off --engine script --no-report --json -q"
    main(["run", "--nproc_per_node", "2", *line.split(), "train.py", "-o", "x"])
    assert " ".join(launched[0].own_flags) == line.replace("-o out", "-o out --force")
    main(["run", "train.py"])
    assert launched[1].own_flags == ()


def test_the_list_of_torchruns_flags_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import get_args_parser

    actions = [action for action in get_args_parser()._actions if action.option_strings]
    theirs = {name for action in actions for name in action.option_strings if "_" not in name}
    ours = {name for flag in torchrun_flags.FLAGS for name in (flag.option, flag.short) if name}
    assert theirs - ours == {"-m", "--module", "-h", "--help"}
    assert ours - theirs <= NEWER_THAN_TORCH_2_11, "flags that no torch has"
    switches = {action.option_strings[0] for action in actions if action.nargs == 0}
    assert {flag.option for flag in torchrun_flags.FLAGS if flag.type is bool} <= switches


def test_torchruns_parser_takes_what_we_pass() -> None:
    from torch.distributed.run import get_args_parser

    samples: dict[Any, Any] = {str: "1", int: 1, float: 0.5, bool: True}
    parser = get_args_parser()
    known = [flag for flag in torchrun_flags.FLAGS if flag.option in parser._option_string_actions]
    values = {flag.name: samples.get(flag.type) or flag.type.__args__[0] for flag in known}
    parsed = parser.parse_args([*torchrun_flags.to_arguments(values), "train.py"])
    assert parsed.training_script == "train.py"
    assert (parsed.nproc_per_node, parsed.monitor_interval, parsed.no_python) == ("1", 0.5, True)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("run", "nothing to run: give a script (train.py), -m and a module, or -- and a command"),
        ("run --", "nothing to run"),
        ("run -m", "-m: the name of a module must follow"),
        ("run missing.py", "missing.py: no such file; give the path of a script"),
        ("run folder.py", "folder.py: is a folder"),
        ("run srun python train.py", "srun: not a script (.py); to run a command, write -- before it"),
        ("run --nproc-per-nod 2 train.py", "--nproc-per-node"),
        ("run --forse train.py", "--force"),
        ("run -z train.py", "No such option: -z; see dsprof run --help"),
        ("run --nproc-per-node", "requires an argument"),
        (
            "run --nproc-per-node train.py",
            "--nproc-per-node train.py: write a number of ranks, at least 1, or gpu, cpu",
        ),
        ("run --nproc_per_node=0 train.py", "--nproc-per-node 0: write a number of ranks"),
        ("run --nproc-per-node -2 train.py", "--nproc-per-node -2: write a number of ranks"),
        ("run --master-port x train.py", "Invalid value for '--master-port'"),
        ("run --level deep train.py", "'deep' is not one of 'light'"),
        ("run --native maybe train.py", "'maybe' is not one of 'auto', 'on', 'off'"),
        ("run --ranks x train.py", "write ranks and ranges, such as 0,2-3"),
        ("run --nproc-per-node 2 -- true", "--nproc-per-node: a flag of torchrun"),
        ("train.py", "not a verb; write `dsprof run train.py`"),
        ("rnu train.py", "'run'"),
        ("run -o train.py train.py", "train.py: is not a folder; give another folder with -o"),
        ("run -o full train.py", "full: holds something other than a run; give another folder with -o"),
        ("run -o full --force train.py", "full: holds something other than a run; give another folder with -o"),
        ("run -o /sys/dsprof train.py", "/sys/dsprof: cannot be written"),
    ],
)
def test_a_wrong_line_costs_one_line_and_creates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], line: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    (tmp_path / "train.py").write_text("raise SystemExit('never')")
    before = sorted(tmp_path.rglob("*"))
    assert main(line.split()) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("[dsprof] error: ")
    assert says in err
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_command_is_status_127(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--", "no-such-program-here"]) == 127
    assert "no-such-program-here: no such command" in capfd.readouterr().err


def test_settings_take_the_command_line_then_the_environment_then_pyproject(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.dsprof]\nranks = "0"\nnative = "off"\ndir = "a"\nreport = false\n')
    environ = {"DSPROF_RANKS": "1-2", "DSPROF_NATIVE": "1"}
    assert settings.load({"ranks": "3", "level": None}, environ, tmp_path) == Settings(
        level="light", dir="a", ranks="3", native="on", report=False
    )
    assert settings.load({}, environ, tmp_path).ranks == "1-2"
    assert settings.load({}, {}, tmp_path).ranks == "0"
    assert settings.load({}, {}, tmp_path / "elsewhere") == Settings()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('levl = "light"', "[tool.dsprof] has no setting 'levl'; did you mean level?"),
        (
            "zzz = 1",
            "known are level, dir, ranks, steps, delay, duration, deep, limit, scratch, exit_wait, native, report",
        ),
        ("level = 3", "[tool.dsprof] level: 3 is not a string"),
        ('level = "deep"', "[tool.dsprof] level: 'deep' is not one of light"),
        ('report = "no"', "[tool.dsprof] report: 'no' is not a true or false"),
        ("report = ", "cannot be read"),
    ],
)
def test_a_wrong_setting_in_pyproject(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.dsprof]\n{content}\n")
    with pytest.raises(SettingsError) as caught:
        settings.load({}, {}, tmp_path)
    assert says in str(caught.value)
    assert "pyproject.toml" in str(caught.value)


def test_a_wrong_setting_in_the_environment() -> None:
    with pytest.raises(SettingsError, match="DSPROF_NATIVE: 'maybe' is not one of auto, on, off"):
        settings.load({}, {"DSPROF_NATIVE": "maybe"}, Path("/nowhere"))


def test_no_report_and_json_and_quiet_reach_the_launch(launched: list[Launch]) -> None:
    main(["run", "--no-report", "--json", "-q", "--force", "-o", "here", "train.py"])
    launch = launched[0]
    assert (launch.settings.report, launch.as_json, launch.quiet, launch.force) == (False, True, True, True)
    assert launch.output == Path("here")


@pytest.mark.parametrize(
    ("chosen", "total", "visible"),
    [("0,1", 4, 2), ("", 4, 0), ("-1", 4, 0), ("0,7,1", 4, 1), ("0,0", 4, 0), ("GPU-abc,GPU-def", 4, 2), ("3", 4, 1)],
)
def test_visible_gpus_are_counted_as_cuda_does(chosen: str, total: int, visible: int) -> None:
    assert count_visible(chosen, total) == visible


def test_names_of_runs() -> None:
    assert Job(("deep/train.py", "x")).name == "train"
    assert Job(("-m", "pkg.train", "x")).name == "pkg.train"
    assert Job(("/usr/bin/srun", "python"), is_command=True).name == "srun"


def test_no_python_starts_any_program(tmp_path: Path) -> None:
    job = cli_run.read_job(["./train.sh", "x"], no_python=True)
    assert (job.words, job.is_program, job.is_command) == (("./train.sh", "x"), True, False)
    with pytest.raises(LaunchError):
        cli_run.read_job(["./train.sh", "x"])


def test_every_parameter_is_typed() -> None:
    parameters = inspect.signature(cli_run.command).parameters
    assert "nproc_per_node" in parameters
    assert all(item.annotation is not inspect.Parameter.empty for item in parameters.values())


def test_help_shows_torchruns_panel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    assert "torchrun" in text
    assert "--nproc-per-node" in text


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    heavy = {"torch", "pandas", "numpy", "plotly", "pyarrow", "jinja2", "pynvml", "tensorboard", "scipy"}
    code = f"import sys; from dsprof.cli import main; main(['run', '--help']); print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_version_and_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dsprof", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.startswith("dsprof 0.")


def test_shell_completion_knows_the_verbs(tmp_path: Path) -> None:
    env = {"_DSPROF_COMPLETE": "complete_bash", "COMP_WORDS": "dsprof ru", "COMP_CWORD": "1"}
    assert "run" in launcher.run([], tmp_path, env).stdout.split()


def test_of_a_verb_that_is_typed_only_its_module_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them take longer than many a command; what is no verb is looked for among all."""
    imported: list[str] = []
    real = importlib.import_module

    def noted(name: str, package: str | None = None) -> ModuleType:
        imported.append(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", noted)
    assert main(["runs", str(tmp_path / "nothing")]) == 3
    assert [name for name in imported if name.startswith("dsprof.cli.")] == ["dsprof.cli.runs"]
    assert main(["rums"]) == 2
    assert "dsprof.cli.tune" in imported
    assert "No such command 'rums'" in capsys.readouterr().err
