"""A fix in the user's files: what is written, what stays as it is, and what is refused with nothing written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dsprof.atomic import write_atomically
from dsprof.cli import main
from dsprof.engine.config import load
from dsprof.fix import CannotEdit
from dsprof.fix.edit_call import set_argument
from dsprof.fix.edit_json import set_value
from dsprof.knobs import flags, parse_settings
from dsprof.run import RunFolder, RunInfo

STALL = {
    "code": "data.stall", "gain": {"ms": 20.0, "low": 18.0, "high": 22.0, "percent": 36.0, "method": "replay"},
    "fixes": [{"kind": "code", "title": "more workers", "patch": [], "gain": None, "set": {"loader.num_workers": 2}}],
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run whose finding advises workers."""
    run = RunFolder(tmp_path / "first")
    run.path.mkdir()
    run.write_info(RunInfo(id="first", name="train", command=["dsprof", "run", "train.py"], status=0))
    run.findings_json.write_text(json.dumps({"findings": [STALL]}))
    return run


TEXT = """{
  // as the cluster wants it
  "train_batch_size": 16,
  "zero_optimization": {
    "stage": 2,
    "reduce_bucket_size": 20000, # small
    "offload": {"device": "none"}
  },
  "bf16": {}
}
"""


@pytest.mark.parametrize(
    ("keys", "value", "old", "new"),
    [
        ("zero_optimization.reduce_bucket_size", 5000, "20000", "5000"),
        ("train_batch_size", 32, "16,", "32,"),
        ("zero_optimization.offload", {"device": "cpu"}, '{"device": "none"}', '{"device": "cpu"}'),
        ("zero_optimization.overlap_comm", True, '"none"}', '"none"},\n    "overlap_comm": true'),
        ("bf16.enabled", True, '"bf16": {}', '"bf16": {"enabled": true}'),
        ("fp16.enabled", False, '"bf16": {}', '"bf16": {},\n  "fp16": {"enabled": false}'),
    ],
)
def test_a_json_text_keeps_all_but_the_value(keys: str, value: object, old: str, new: str) -> None:
    assert set_value(TEXT, keys.split("."), value) == TEXT.replace(old, new)


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": }', '{"a": 1} 2', "", '{"a" 1}'])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(CannotEdit):
        set_value(text, ["a"], 1)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("x = DataLoader(data)\n", "x = DataLoader(data, num_workers=2)\n"),
        ("x = DataLoader()\n", "x = DataLoader(num_workers=2)\n"),
        ("x = DataLoader(data, num_workers=0, shuffle=1)\n", "x = DataLoader(data, num_workers=2, shuffle=1)\n"),
        ("ö = é(DataLoader(\n    data,  # ü\n))", "ö = é(DataLoader(\n    data, num_workers=2,  # ü\n))"),
        ("for x in Loads(f(data)):\n    pass\n", None),
        ("x = make(data)\n", None),  # which takes who knows what
        ("x = partial(DataLoader, data)\n", None),
        ("x = DataLoader(data,)\n", "x = DataLoader(data, num_workers=2,)\n"),
        ("x = DataLoader((data))\n", "x = DataLoader((data), num_workers=2)\n"),
        ("x = DataLoader(a, num_workers=(\n 0\n))\n", "x = DataLoader(a, num_workers=2)\n"),
        ("x = DataLoader(data, 1, False, None, None, 0)\n", "x = DataLoader(data, 1, False, None, None, 2)\n"),
        ("x = DataLoader(data, **settings)\n", None),
        ("x = DataLoader(data, num_workers=1, **settings)\n", "x = DataLoader(data, num_workers=2, **settings)\n"),
        ("x = DataLoader(*settings)\n", None),
        ("x = DataLoader(one for one in data)\n", None),
        ("x = Loads(data)\nfrom torch.utils.data import DataLoader as Loads", "x = Loads(data, num_workers=2)\n"
         "from torch.utils.data import DataLoader as Loads"),
        ("x = Mine(data)\nclass Mine(DataLoader): pass\n", "x = Mine(data, num_workers=2)\n"
         "class Mine(DataLoader): pass\n"),
        ("x = Mine(data)\nclass Mine(DataLoader):\n    def __init__(self, data): ...\n", None),
        ("x = '\f\u2028', DataLoader(data)  # )\r\n", "x = '\f\u2028', DataLoader(data, num_workers=2)  # )\r\n"),
        ("\ufeffx = DataLoader(data)", "\ufeffx = DataLoader(data, num_workers=2)"),
        ("x = DataLoader(a), DataLoader(b)\n", None),
        ("x = (\n", None),
    ],
)  # fmt: skip
def test_a_call_keeps_all_but_the_argument(text: str, wanted: str | None) -> None:
    if wanted is None:
        with pytest.raises(CannotEdit):
            set_argument(text, 1, "loader", "num_workers", 2)
    else:
        assert set_argument(text, 1, "loader", "num_workers", 2) == wanted


def test_files_are_written_beside_the_originals_and_never_over_what_is_there(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, configuration = tmp_path / "train.py", tmp_path / "ds.json"
    script.write_text("import x\nloader = DataLoader(data)\n")
    configuration.write_text('{"zero_optimization": {"stage": 2}}')
    info = run.read_info()
    info.cwd = str(tmp_path)
    info.facts = [
        {"fact": "dataloader", "site": f"{script}:2", "framework": None},
        {"fact": "config", "path": str(configuration), "content": {"zero_optimization": {"stage": 2}}},
    ]
    run.write_info(info)

    assert main(["fix", str(run.path)]) == 0
    assert "+loader = DataLoader(data, num_workers=2)" in capsys.readouterr().out
    both = ["--set", "loader.num_workers=4", "--set", "zero_optimization.stage=1", "--set", "env.A=b"]
    assert main(["fix", str(run.path), *both, "--write"]) == 0
    assert (tmp_path / "train.fixed.py").read_text() == "import x\nloader = DataLoader(data, num_workers=4)\n"
    assert (tmp_path / "ds.fixed.json").read_text() == '{"zero_optimization": {"stage": 1}}'
    assert "by hand: export A=b" in capsys.readouterr().out

    assert main(["fix", str(run.path), *both, "--write"]) == 2
    assert "is there already" in capsys.readouterr().err
    configuration.write_text('{"zero_optimization": {"stage": 3}}')
    assert main(["fix", str(run.path), *both, "--in-place"]) == 2
    assert "it has been edited since the run" in capsys.readouterr().err
    assert script.read_text() == "import x\nloader = DataLoader(data)\n"
    assert main(["fix", str(run.path), "--in-place"]) == 0
    assert script.read_text() == "import x\nloader = DataLoader(data, num_workers=2)\n"


@pytest.mark.parametrize(
    ("text", "edited"),
    [
        ('{\r\n  "b": 1\r\n}\r\n', '{\r\n  "b": 1,\r\n  "a": 2\r\n}\r\n'),
        ('\ufeff{"a": 1}', '\ufeff{"a": 2}'),
        ('{"a": 1, "a": 3}', '{"a": 1, "a": 2}'),  # the last one counts
        ('{"ä": "\\"}", "b": 1,\n\n "a":1 }', '{"ä": "\\"}", "b": 1,\n\n "a":2 }'),
    ],
)
def test_a_json_text_keeps_how_it_is_written(text: str, edited: str) -> None:
    assert set_value(text, ["a"], 2) == edited


def prepare(run: RunFolder, files: Mapping[str, str], sites: list[str]) -> Path:
    """Write files where the job ran, whose loaders were made at these sites. Gives the folder."""
    place = run.path.parent
    for name, text in files.items():
        (place / name).write_bytes(text.encode())
    info = run.read_info()
    info.cwd = str(place)
    info.facts = [{"fact": "dataloader", "site": f"{place}/{site}", "framework": None} for site in sites]
    run.write_info(info)
    return place


def test_an_edit_that_takes_lines_away_leaves_the_other_calls_where_they_are(run: RunFolder) -> None:
    text = (
        "a = DataLoader(x, num_workers=(\r\n    0\r\n))\r\nb = DataLoader(y)\r\n# DataLoader\r\nc = DataLoader(z)\r\n"
    )
    place = prepare(run, {"train.py": text}, ["train.py:1", "train.py:4", "train.py:6"])
    both = ["--set", "loader.num_workers=4", "--set", "loader.pin_memory=true"]
    assert main(["fix", str(run.path), *both, "--write"]) == 0
    more = "num_workers=4, pin_memory=True"
    lines = [f"a = DataLoader(x, {more})", f"b = DataLoader(y, {more})", "# DataLoader", f"c = DataLoader(z, {more})"]
    assert (place / "train.fixed.py").read_bytes().decode() == "".join(f"{line}\r\n" for line in lines)


def test_a_link_stays_one_and_the_file_behind_it_is_changed(run: RunFolder) -> None:
    place = prepare(run, {"real.py": "a = DataLoader(x)\n"}, ["train.py:1"])
    (place / "train.py").symlink_to("real.py")
    assert main(["fix", str(run.path), "--in-place"]) == 0
    assert (place / "train.py").is_symlink()
    assert (place / "real.py").read_text() == "a = DataLoader(x, num_workers=2)\n"


@pytest.mark.parametrize("words", [["--write"], ["--in-place"]])
def test_where_one_file_cannot_be_written_none_is(
    run: RunFolder, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"a.py": "a = DataLoader(x)\n", "b.py": "b = DataLoader(x)\n"}
    place = prepare(run, files, ["a.py:1", "b.py:1"])

    def full(path: Path, data: str, **kwargs: Any) -> None:
        if path.name.startswith("b."):
            raise OSError(28, "No space left on device", str(path))
        write_atomically(path, data, **kwargs)

    monkeypatch.setattr("dsprof.fix.files.write_atomically", full)
    assert main(["fix", str(run.path), *words]) == 2
    assert "nothing was written" in capsys.readouterr().err
    assert {one.name: one.read_text() for one in place.glob("*.py")} == files


def test_a_file_that_is_not_to_be_written_is_left_alone(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    place = prepare(run, {"a.py": "a = DataLoader(x)\n"}, ["a.py:1"])
    (place / "a.py").chmod(0o444)
    assert main(["fix", str(run.path), "--in-place"]) == 2
    assert "it is read-only" in capsys.readouterr().err
    assert (place / "a.py").read_text() == "a = DataLoader(x)\n"


def test_a_file_in_another_encoding_is_told(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    place = prepare(run, {}, ["a.py:1"])
    (place / "a.py").write_bytes("# coding: latin-1\na = DataLoader('ä')\n".encode("latin-1"))
    assert main(["fix", str(run.path), "--write"]) == 2
    assert "it is not written in UTF-8; nothing was written" in capsys.readouterr().err


# --- what cannot be written


def with_configuration(run: RunFolder, content: dict[str, Any], **facts: Any) -> Path:
    """The run had this configuration, which is a file."""
    place = prepare(run, {"ds.json": json.dumps(content)}, ["train.py:1"])
    info = run.read_info()
    info.facts.append({"fact": "config", "path": str(place / "ds.json"), "content": content, "rank": 0})
    run.write_info(info)
    return place


BATCHES = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}


@pytest.mark.parametrize("how", ["--write", "--in-place"])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["loader.nm_workers=2"], "did you mean loader.num_workers?"),
        (["loader.num_workers=-1"], "write a whole number from 0 to 1024 (processes)"),
        (["zero_optimization.stage=4"], "zero_optimization.stage=4: write 0, 1, 2 or 3"),
        (["ddp.bucket_cap_mb=50"], "ddp.bucket_cap_mb: the run has no DistributedDataParallel; nothing was written"),
        (["fsdp2.reshard_after_forward=false"], "the run has no fully_shard; nothing was written"),
        (["loader.num_workers=2", "fsdp2.reshard_after_forward=false"], "the run has no fully_shard"),
        (["optimizer.fused=true", "optimizer.foreach=true"], "torch refuses an optimizer that is both"),
        (["zero_optimization.stage=1", "zero_optimization={}"], "the second is in the first"),
        (["gradient_accumulation_steps=3"], "no train_micro_batch_size_per_gpu makes train_batch_size 64 of 24 x"),
    ],
)
def test_what_cannot_be_written_says_why_and_nothing_is(
    words: list[str], says: str, how: str, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    place = with_configuration(run, BATCHES)
    (place / "train.py").write_text("loader = DataLoader(data)\n")
    before = {path.name: path.read_text() for path in place.iterdir() if path.is_file()}
    assert main(["fix", str(run.path), *(word for one in words for word in ("--set", one)), how]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert {path.name: path.read_text() for path in place.iterdir() if path.is_file()} == before


def test_a_fix_that_no_longer_applies_is_told(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    place = prepare(run, {"train.py": "import x\n\nloader = DataLoader(data)\n"}, ["train.py:1"])
    assert main(["fix", str(run.path), "--in-place"]) == 2
    assert "line 1 has no call of DataLoader: it is made in another way there, or the file was edited since" in (
        capsys.readouterr().err
    )
    assert (place / "train.py").read_text() == "import x\n\nloader = DataLoader(data)\n"


def test_a_folder_that_is_read_only_is_told(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("dsprof.fix.files.write_atomically", refuse)
    place = prepare(run, {"train.py": "loader = DataLoader(data)\n"}, ["train.py:1"])
    assert main(["fix", str(run.path), "--write"]) == 2
    assert f"Permission denied: '{place}/train.fixed.py'; nothing was written" in capsys.readouterr().err
    assert [path.name for path in place.glob("*.py")] == ["train.py"]


@pytest.mark.parametrize(
    ("words", "then"),
    [
        (["gradient_accumulation_steps=8"],
         {**BATCHES, "gradient_accumulation_steps": 8, "train_micro_batch_size_per_gpu": 1}),
        (["train_micro_batch_size_per_gpu=8"],
         {**BATCHES, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}),
        (["train_batch_size=128"], {**BATCHES, "train_batch_size": 128, "gradient_accumulation_steps": 8}),
        (["train_batch_size=128", "gradient_accumulation_steps=2"],
         {"train_batch_size": 128, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}),
        (["gradient_accumulation_steps=4"], BATCHES),
    ],
)  # fmt: skip
def test_batch_sizes_are_written_so_that_they_belong_together(
    words: list[str], then: dict[str, int], run: RunFolder
) -> None:
    """Of eight data-parallel ranks."""
    place = with_configuration(run, BATCHES)
    flags = [word for one in words for word in ("--set", one)]
    assert main(["fix", str(run.path), *flags, "--write"]) == 0
    written = json.loads((place / "ds.fixed.json").read_text())
    assert written == then
    assert load(written, world_size=8).train_batch_size == then["train_batch_size"]


def test_batch_sizes_belong_together_too_where_the_run_had_turned_something(run: RunFolder) -> None:
    """What ran is then not what the file has."""
    place = with_configuration(run, BATCHES)
    info = run.read_info()
    info.knobs = {"gradient_clipping": 2.0}
    run.write_info(info)
    assert main(["fix", str(run.path), "--set", "gradient_accumulation_steps=8", "--write"]) == 0
    assert load(json.loads((place / "ds.fixed.json").read_text()), world_size=8).train_batch_size == 64


def test_every_call_of_fully_shard_is_changed(run: RunFolder) -> None:
    text = "for layer in model:\n    fully_shard(layer, mesh=mesh)\nfully_shard(model)\n"
    place = prepare(run, {"train.py": text}, [])
    info = run.read_info()
    sites = [f"{place}/train.py:2", f"{place}/train.py:3"]
    info.facts = [{"fact": "fsdp", "version": 2, "site": sites[0], "sites": sites, "rank": rank} for rank in range(2)]
    run.write_info(info)
    assert main(["fix", str(run.path), "--set", "fsdp2.reshard_after_forward=false", "--write"]) == 0
    assert (place / "train.fixed.py").read_text() == (
        "for layer in model:\n    fully_shard(layer, mesh=mesh, reshard_after_forward=False)\n"
        "fully_shard(model, reshard_after_forward=False)\n"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("zero_optimization.offload_optimizer", {"device": "cpu", "pin_memory": True}),
        ("optimizer.params.betas", [0.9, 0.95]),
        ("communication_data_type", None),
        ("optimizer.params.name", "true"),
        ("optimizer.params.name", "12"),
        ("optimizer.type", "AdamW"),
        ("env.OMP_NUM_THREADS", "4"),
        ("loader.pin_memory", False),
        ("affinity.cores", "spread"),
    ],
)
def test_a_change_is_read_as_it_was_typed(key: str, value: object) -> None:
    assert parse_settings(flags([(key, value)])[1:]) == {key: value}
