"""TensorBoard files, read back with TensorBoard's own reader."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import factories
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from dsprof.reports import tensorboard
from dsprof.reports.tensorboard.text import markdown_texts, verdict_markdown


def read(folder: Path) -> EventAccumulator:
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    return reader


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, round(event.value, 3)) for event in read(folder).Scalars(tag)]


def texts(folder: Path) -> dict[str, str]:
    reader = read(folder / "verdict")
    return {tag: reader.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in reader.Tags()["tensors"]}


def test_scalars(tmp_path: Path) -> None:
    tensorboard.write(factories.straggler(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["max", "mean", "rank0", "rank1", "verdict"]
    assert scalars(tmp_path / "mean", "step_ms/whole")[:2] == [(0, 212.4), (1, 212.0)]
    assert scalars(tmp_path / "mean", "budget_ms/peer_wait")[0] == (0, 19.2)
    assert scalars(tmp_path / "max", "budget_ms/peer_wait")[0] == (0, 38.4)
    assert scalars(tmp_path / "rank0", "by_rank_ms/own_work")[0] == (0, 162.0)
    assert scalars(tmp_path / "rank1", "by_rank_ms/own_work")[0] == (0, 200.4)
    tags = read(tmp_path / "mean").Tags()["scalars"]
    assert "budget_ms/bubble" not in tags
    assert len(tags) == 8


def test_wall_times_follow_the_run(tmp_path: Path) -> None:
    tensorboard.write(factories.straggler(), tmp_path)
    first, second = read(tmp_path / "mean").Scalars("step_ms/whole")[:2]
    assert first.wall_time == 1795169700.0  # 2026-11-20T10:15:00Z
    assert second.wall_time - first.wall_time == pytest.approx(0.2124)


def test_a_spike_in_many_steps_survives(tmp_path: Path) -> None:
    job = factories.Job(ranks=2, steps=5000, pauses={(1, 3333): 160.0})
    tensorboard.write(factories.build(job), tmp_path)
    pauses = scalars(tmp_path / "max", "budget_ms/pause")
    assert len(pauses) == 500
    assert [point for point in pauses if point[1] > 0] == [(3339, 160.0)]
    assert dict(scalars(tmp_path / "mean", "budget_ms/pause"))[3339] == 8.0
    assert dict(scalars(tmp_path / "rank1", "by_rank_ms/pause"))[3339] == 160.0
    assert dict(scalars(tmp_path / "p99", "step_ms/whole"))[3339] > 300


def test_many_ranks_show_those_that_findings_name(tmp_path: Path) -> None:
    tensorboard.write(factories.wide(ranks=64, steps=4), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["max", "mean", "rank5", "verdict"]


def test_text(tmp_path: Path) -> None:
    tensorboard.write(factories.straggler(), tmp_path)
    shown = texts(tmp_path)
    assert list(shown) == ["00 verdict", "01 rank.straggler", "02 comm.small-messages"]
    assert shown["00 verdict"] == verdict_markdown(factories.straggler())
    assert shown["01 rank.straggler"] == (
        "### rank 1 arrives late in every step: its forward takes longer\n"
        "\n"
        "**high**; saves 37\\.9 ms a step \\(18 %\\) \\[31\\.2, 44\\.6\\]; confidence 97 %\n"
        "\n"
        "Where: rank 1, all\\_reduce, group 0, steps 0\\-39\n"
        "\n"
        "**Fix**: the slow part is called here; move it off the training thread\n"
        "\n"
        "    examples/train_gpt.py:112  slow_rank=None\n"
        "\n"
        "**Fix**: or leave it the cores\n"
        "\n"
        "    export OMP_NUM_THREADS=1\n"
        "\n"
        "| evidence | measured | expected |\n"
        "|---|---:|---:|\n"
        "| forward on rank 1 | 88\\.0 ms | 50\\.0 ms |\n"
        "| steps in which it is last | 40 of 40 | 20 of 40 |\n"
    )


def test_the_verdict_as_text() -> None:
    text = verdict_markdown(factories.evaluates())
    assert text.splitlines()[:7] == [
        "## rank 0 alone evaluates and the others wait; it takes 42\\.0 ms of each step",
        "",
        "Verdict: **bottleneck**",
        "",
        "Note: steps are slower from step 41 on",
        "",
        "Step 175 ms (median 175, p10-p90 174-175), 44 ordinary steps of 60, 2 ranks; "
        "a step is an iteration of 6 optimizer steps: 5 of Adam 1, 1 of Adam 2\\.",
    ]
    assert "\n1. **high** `eval.uneven` rank 0 alone evaluates and the others wait (saves 42\\.0 ms" in text
    assert "\nIts wall time, 18\\.5 s; mean over the ranks\\.\n" in text
    assert "| training | 12\\.6 s | 68 % | training steps |  |\n" in text
    assert "| evaluation | 1\\.3 s | 6\\.8 % |" in text
    assert "| `eval.uneven` |\n" in text
    assert "\nNot judged: `rank.straggler` (the ranks do different work)\n" in text
    assert ", noise 0\\.60 ms\n" in text
    assert "Where the run goes" not in verdict_markdown(factories.empty())


def test_kinds_of_time(tmp_path: Path) -> None:
    tensorboard.write(factories.evaluates(), tmp_path)
    tags = read(tmp_path / "verdict").Tags()["scalars"]
    assert tags == [f"time_s/{kind}" for kind in ("training", "evaluation", "checkpointing", "startup", "rest")]
    assert scalars(tmp_path / "verdict", "time_s/evaluation") == [(0, 1.26)]


def test_markdown_in_names_is_escaped() -> None:
    finding = replace(factories.STRAGGLER, title="**bold** | <script>alert(1)</script> [x](http://y)")
    shown = markdown_texts(replace(factories.straggler(), findings=(finding,)))
    assert shown["01 rank.straggler"].startswith(
        "### \\*\\*bold\\*\\* \\| \\<script\\>alert\\(1\\)\\</script\\> \\[x\\]\\(http://y\\)\n"
    )


def test_a_dashboard_is_laid_out(tmp_path: Path) -> None:
    tensorboard.write(factories.straggler(), tmp_path)
    stored = read(tmp_path / "mean").Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    layout = layout_pb2.Layout.FromString(stored)
    assert [chart.multiline.tag[0] for chart in layout.category[0].chart] == [
        "budget_ms/.*", "by_rank_ms/own_work", "by_rank_ms/(peer_wait|comm_exposed|bubble)", "by_rank_gib/.*",
    ]  # fmt: skip


def test_writing_again_replaces_only_our_files(tmp_path: Path) -> None:
    tensorboard.write(factories.straggler(), tmp_path)
    first = {path: path.read_bytes() for path in tmp_path.rglob("*tfevents*")}
    tensorboard.write(factories.straggler(), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*tfevents*")} == first

    theirs = tmp_path / "mean" / "events.out.tfevents.1.host.user"
    theirs.write_bytes(b"")
    tensorboard.write(factories.empty(), tmp_path)
    left = [path for path in tmp_path.rglob("*tfevents*") if path != theirs]
    assert [path.parent.name for path in left] == ["verdict"]
    assert theirs.exists()
    assert "no complete step was captured" in texts(tmp_path)["00 verdict"]


def test_writing_needs_neither_torch_nor_tensorflow() -> None:
    code = (
        "import sys; import dsprof.reports.tensorboard\n"
        "print([name for name in ('torch', 'tensorflow', 'plotly') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
