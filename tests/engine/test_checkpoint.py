"""Checkpoints: going on exactly, on other ranks and stages too, after any accident, and without running anything."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import save_on_small_disk
from models import Small, batches, build
from ranks import Ranks
from spans import recorded
from torch import Tensor

from dsprof import engine as ds
from dsprof.engine import Engine, checkpoint
from dsprof.engine.checkpoint import CheckpointError, dcp
from dsprof.engine.checkpoint.dcp import Contents, Piece, _Value, shares
from dsprof.engine.checkpoint.folder import Place, pack, unpack
from dsprof.engine.checkpoint.state import about_training

BIG = {"stage3_param_persistence_threshold": 100}


class Noisy(Small):
    """Its loss depends on random numbers; it has a buffer that counts and one that is not to be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(ids) * (1 + 0.1 * torch.rand(()))


def config(stage: int = 0, *, zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 10},
        },
        "zero_optimization": {"stage": stage, **(BIG if stage == 3 else {}), **(zero or {})},
        **more,
    }


def start(settings: dict[str, Any], make: Callable[[], Small] = Noisy) -> Engine:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=settings)
    return engine


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def train(engine: Engine, steps: slice) -> None:
    rank, size = rank_and_size()
    for step in batches(8, 1, size)[steps]:
        engine.backward(engine(step[0][rank]))
        engine.step()


def contents(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint."""
    opened = Contents(path)
    found = {}
    for name, about in opened._metadata.state_dict_metadata.items():
        if hasattr(about, "size"):
            found[name] = torch.full((about.size[0],), 77, dtype=about.properties.dtype)
    opened.read([Piece(name, flat, flat.numel()) for name, flat in found.items()])
    return found


def differences(one: Path, other: Path) -> list[str]:
    """Names of the tensors in which two checkpoints differ."""
    first, second = contents(one), contents(other)
    assert len(first) > 20
    return [name for name in first.keys() | second.keys()
            if name not in first or name not in second or not torch.equal(first[name], second[name])]  # fmt: skip


# --- going on


def resumed(rank: int, folder: Path, settings: dict[str, Any]) -> bool:
    """Save what four steps come to, and two and two with a checkpoint between them; whether random numbers agree."""
    random.seed(rank)
    torch.manual_seed(rank)
    engine = start(settings)
    train(engine, slice(0, 2))
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    train(engine, slice(2, 4))
    engine.save_checkpoint(folder, "through", save_latest=False)
    drawn = (torch.rand(()), random.random())
    engine.destroy()

    again = start(settings)
    path, state = again.load_checkpoint(folder)
    assert (path, state) == (str(folder / "global_step2"), {"epoch": 3})
    assert (again.global_steps, again.micro_steps, again.global_samples) == (2, 2, 4 * dist.get_world_size())
    train(again, slice(2, 4))
    again.save_checkpoint(folder, "resumed")
    same = (torch.rand(()), random.random()) == drawn and again.get_lr() == engine.get_lr()
    again.destroy()
    return same


RESUMES = {
    "one rank": (1, config(0)),
    "stage 0, 3 ranks": (3, config(0, zero={"reduce_bucket_size": 1000})),
    "stage 1, bf16": (2, config(1, bf16={"enabled": True})),
    "stage 2, round robin": (3, config(2, zero={"round_robin_gradients": True, "reduce_bucket_size": 1000})),
    "stage 3": (2, config(3)),
    "stage 3, fp16": (2, config(3, fp16={"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2})),
    "sgd": (2, config(2, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}})),
    "muon": (2, config(1, optimizer={"type": "Muon", "params": {"lr": 0.01}}, scheduler=None)),
    "1-bit": (2, config(0, optimizer={"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 1}})),
}


@pytest.mark.parametrize("case", RESUMES)
def test_a_resumed_training_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, case: str) -> None:
    size, settings = RESUMES[case]
    settings = {key: value for key, value in settings.items() if value is not None}
    assert ranks.run(size, resumed, tmp_path, settings) == [True] * size
    assert differences(tmp_path / "through", tmp_path / "resumed") == []


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}])
def test_states_and_parameters_in_files_are_saved_and_loaded(
    ranks: Ranks, tmp_path: Path, precision: dict[str, Any]
) -> None:
    disk = tmp_path / "nvme"
    disk.mkdir()
    nvme = {"device": "nvme", "nvme_path": str(disk)}
    zero = {"offload_optimizer": nvme, "offload_param": nvme, "sub_group_size": 1000}
    assert ranks.run(2, resumed, tmp_path, config(3, zero=zero, **precision)) == [True, True]
    assert differences(tmp_path / "through", tmp_path / "resumed") == []


# --- on other ranks


def saved(rank: int, folder: Path, settings: dict[str, Any], steps: int = 2) -> None:
    engine = start(settings)
    train(engine, slice(0, steps))
    engine.save_checkpoint(folder, "one")
    engine.destroy()


def saved_again(rank: int, folder: Path, settings: dict[str, Any], steps_before: int = 0) -> float:
    """Load, and save what was loaded; the largest difference between the model and the saved weights."""
    engine = start(settings)
    train(engine, slice(4, 4 + steps_before))
    if steps_before and engine.zero.fetcher is not None:
        engine.eval()
        engine(batches(1, 1, 1)[0, 0, 0])  # leaves parameters of the old weights where they are
        engine.train()
    engine.load_checkpoint(folder, "one")
    engine.save_checkpoint(folder, "two")
    expected = contents(folder / "one")
    engine.zero.gatherer.gather([p for p in engine.zero.params if not p.resident], 10**9)
    difference = max(
        (p.param.detach().float().view(-1) - expected[f"weight/{p.name}"]).abs().max().item()
        for p in engine.zero.params
    )
    train(engine, slice(2, 3))
    engine.destroy()
    return difference


MOVES = [
    ((1, config(0)), (3, config(3))),
    ((3, config(3)), (1, config(1))),
    ((3, config(2, zero={"round_robin_gradients": True})), (2, config(0))),
    ((4, config(1)), (3, config(2, zero={"round_robin_gradients": True}))),
    ((2, config(0)), (4, config(1))),
]


@pytest.mark.parametrize("steps_before", [2, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("before", "after"), MOVES)
def test_any_ranks_and_stage_can_load(ranks: Ranks, tmp_path: Path, before: Any, after: Any, steps_before: int) -> None:
    ranks.run(before[0], saved, tmp_path, before[1])
    assert ranks.run(after[0], saved_again, tmp_path, after[1], steps_before) == [0.0] * after[0]
    assert differences(tmp_path / "one", tmp_path / "two") == []


def test_another_precision_can_load(ranks: Ranks, tmp_path: Path) -> None:
    """The masters are saved, so nothing is lost on the way to bf16 and back."""
    ranks.run(2, saved, tmp_path, config(2))
    found = ranks.run(1, saved_again, tmp_path, config(3, bf16={"enabled": True}))
    assert 1e-4 < found[0] < 0.02
    frozen = {"weight/frozen.weight", "weight/frozen.bias", "buffer/turned"}  # they have no masters
    assert set(differences(tmp_path / "one", tmp_path / "two")) <= frozen


def test_what_one_bit_adam_still_owes_is_forgiven_on_other_ranks(ranks: Ranks, tmp_path: Path) -> None:
    settings = RESUMES["1-bit"][1]
    ranks.run(2, saved, tmp_path, settings, 3)
    assert any(
        name.startswith("optimizer/worker_error/") and name.endswith("/1") for name in contents(tmp_path / "one")
    )
    ranks.run(3, saved_again, tmp_path, settings)
    found = contents(tmp_path / "two")
    owed = [flat for name, flat in found.items() if "_error/" in name]
    assert owed
    assert all((flat == 0).all() for flat in owed)
    assert all("_error/" in name for name in differences(tmp_path / "one", tmp_path / "two"))


def test_large_pieces_are_written_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that memory for copies, in writing and in reading, does not grow with the parameters."""
    monkeypatch.setattr(dcp, "CHUNK", 3)
    alone = Piece("alone", torch.arange(7), 100, 40)
    chunks = [(share.start, share.flat.tolist()) for share in shares([alone], 1, 3)]
    assert chunks == [(40, [0, 1, 2]), (43, [3, 4, 5]), (46, [6])]


def test_what_all_ranks_have_is_divided_among_them_once() -> None:
    sizes = (5, 200_000, 70_000, 0, 1)
    written = {number: torch.zeros(size) for number, size in enumerate(sizes)}
    for rank in range(3):
        all_of_them = [Piece(str(number), torch.ones(size), size, everywhere=True) for number, size in enumerate(sizes)]
        own = list(shares(all_of_them, rank, 3))
        assert own
        for share in own:
            written[int(share.name)][share.start : share.start + share.flat.numel()] += share.flat
    assert all((flat == 1).all() for flat in written.values())


# --- tags and parts


def test_without_latest_nothing_is_loaded(tmp_path: Path) -> None:
    engine = start(config())
    with pytest.warns(UserWarning, match=r"there is no file .*latest"):
        assert engine.load_checkpoint(tmp_path) == (None, None)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint 7 in .*; it has none"):
        engine.load_checkpoint(tmp_path, 7)
    engine.save_checkpoint(tmp_path, "first", save_latest=False)
    assert not (tmp_path / "latest").exists()
    with pytest.raises(CheckpointError, match=r"it has first$"):
        engine.load_checkpoint(tmp_path, "second")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match=r"is not a checkpoint of dsprof.*DeepSpeed"):
        engine.load_checkpoint(tmp_path, "theirs")


@pytest.mark.parametrize("tag", ["", "latest", ".x", "a/b", ".."])
def test_a_tag_that_is_no_name_is_refused(tmp_path: Path, tag: str) -> None:
    engine = start(config())
    with pytest.raises(CheckpointError, match="cannot name a checkpoint"):
        engine.save_checkpoint(tmp_path, tag)
    assert list(tmp_path.iterdir()) == []


def tagged(rank: int, folder: Path, validation: str) -> tuple[str | None, list[str]]:
    engine = start(config(checkpoint={"tag_validation": validation}))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            engine.save_checkpoint(folder, f"of{rank}")
        except CheckpointError as error:
            return str(error), []
    return None, [str(warning.message) for warning in told if "tag" in str(warning.message)]


def test_tags_of_ranks_are_compared(ranks: Ranks, tmp_path: Path) -> None:
    text = "rank 0 gave the tag 'of0', and rank 1 'of1'; give the same on all ranks"
    failed = (f"no checkpoint was saved: {text} (checkpoint.tag_validation is Fail)", [])
    assert ranks.run(2, tagged, tmp_path, "Fail") == [failed, failed]
    assert list(tmp_path.iterdir()) == []
    assert ranks.run(2, tagged, tmp_path, "Warn") == [
        (None, [f"save_checkpoint: {text}. Rank 0's is taken"]),
        (None, []),
    ]
    assert ranks.run(2, tagged, tmp_path, "Ignore") == [(None, []), (None, [])]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "of0"]
    assert (tmp_path / "latest").read_text() == "of0"


def test_parts_can_be_left_out(tmp_path: Path) -> None:
    engine = start(config())
    train(engine, slice(0, 3))
    engine.save_checkpoint(tmp_path, "one")
    trained = {name: value.clone() for name, value in engine.module.state_dict().items()}

    module_only = start(config())
    module_only.load_checkpoint(tmp_path, load_module_only=True)
    assert all(torch.equal(trained[name], value) for name, value in module_only.module.state_dict().items())
    assert module_only.global_steps == 0
    assert module_only.optimizer is not None
    assert not module_only.optimizer.state

    other = start(config(optimizer={"type": "SGD", "params": {"lr": 0.1}}, scheduler={
        "type": "WarmupDecayLR", "params": {"total_num_steps": 100}}))  # fmt: skip
    with pytest.raises(CheckpointError, match=r"state of AdamW, and the optimizer is SGD.*load_optimizer_states=False"):
        other.load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="schedule WarmupLR, and the schedule is WarmupDecayLR"):
        other.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert other.global_steps == 0
    other.load_checkpoint(tmp_path, load_optimizer_states=False, load_lr_scheduler_states=False)
    assert other.global_steps == 3
    assert all(torch.equal(trained[name], value) for name, value in other.module.state_dict().items())


def test_a_model_that_differs_is_refused_unless_strict_is_off(tmp_path: Path) -> None:
    class Other(Noisy):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            del self.gain, self.turned
            self.gain = 1.0
            self.more = torch.nn.Linear(width, 2)

    start(config()).save_checkpoint(tmp_path)
    other = start(config(), Other)
    text = (
        r"there are 2 parameters that the checkpoint has not, the first: more.bias; and 1 parameters that the model "
        r"has not, the first: gain. To load what both have, give load_module_strict=False"
    )
    with pytest.raises(CheckpointError, match=text):
        other.load_checkpoint(tmp_path, load_optimizer_states=False)
    with pytest.warns(UserWarning, match=r"the first: (gain|turned)"):
        other.load_checkpoint(tmp_path, load_module_strict=False, load_optimizer_states=False)

    narrow = start(config(), lambda: Other(width=4))
    other.save_checkpoint(tmp_path, "narrow")
    with pytest.raises(
        CheckpointError, match=r"more.weight has shape \(2, 3\) in the checkpoint, and \(2, 4\) in the model"
    ):
        narrow.load_checkpoint(tmp_path, "narrow", load_module_strict=False)


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    engine = start(config())
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert "weight/frozen.weight" not in contents(tmp_path / "global_step0")
    again = start(config())
    again.module.frozen.weight.data.fill_(5.0)
    again.load_checkpoint(tmp_path)
    assert (again.module.frozen.weight == 5.0).all()


def test_a_step_that_is_not_complete_begins_anew(tmp_path: Path) -> None:
    engine = start(config(gradient_accumulation_steps=3))
    for _ in range(4):
        engine.backward(engine(batches(1, 1, 1)[0, 0, 0]))
        engine.step()
    with pytest.warns(UserWarning, match="in the middle of a step"):
        engine.save_checkpoint(tmp_path)
    again = start(config(gradient_accumulation_steps=3))
    again.load_checkpoint(tmp_path)
    assert (again.global_steps, again.micro_steps, again.hooks.step, again.hooks.microbatch) == (1, 3, 1, 0)
    engine.load_checkpoint(tmp_path)
    assert engine.micro_steps == 3
    assert all(param.grad is None for param in engine.module.parameters())


def test_spans_report_checkpoints(tmp_path: Path) -> None:
    engine = start(config())
    with recorded() as spans:
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        engine.save_16bit_model(tmp_path)
    assert [(span.kind, span.name, bool(span.bytes)) for span in spans if span.purpose == "checkpoint"] == [
        ("copy", "checkpoint_write", True), ("phase", "checkpoint", False),
        ("copy", "checkpoint_read", True), ("phase", "checkpoint", False),
        ("copy", "checkpoint_write", True), ("phase", "checkpoint", False),
    ]  # fmt: skip


# --- the client's state


def test_the_clients_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {
        "a": [1, 2.5, None, True, (3, "x")],
        7: {"t": torch.arange(3)},
        "b": b"\x00\xff",
        "s": {1, 2},
        "big": 2**80,
    }
    engine = start(config())
    engine.save_checkpoint(tmp_path, client_state=state)
    _, back = engine.load_checkpoint(tmp_path)
    assert back is not None
    assert torch.equal(back[7].pop("t"), torch.arange(3))
    assert back == {**state, 7: {}}


def test_a_kind_of_value_that_would_need_code_is_refused(tmp_path: Path) -> None:
    engine = start(config())
    with pytest.raises(
        CheckpointError, match=r"client_state\['args'\]\[1\] is a pathlib.PosixPath.*str\(x\) for a path"
    ):
        engine.save_checkpoint(tmp_path, client_state={"args": [0, Path("x")]})
    assert list(tmp_path.iterdir()) == []


def test_a_view_takes_nothing_else_along() -> None:
    assert len(pack(torch.zeros(1_000_000)[:2], "x")) < 10_000


# --- accidents


def killed_at(number: int, folder: str, save: Callable[[], object]) -> int:
    """Fork, and `save` there; the process ends before its file operation `number` in `folder`. Its exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    gc.disable()  # what it would collect has threads, and those are not here
    seen = 0

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir") and any(
            isinstance(arg, str | Path) and str(arg).startswith(folder) for arg in args
        ):
            if seen == number:
                os._exit(9)
            seen += 1

    sys.addaudithook(watch)
    try:
        save()
    except BaseException:
        os._exit(1)
    os._exit(0)


def kill_everywhere(rank: int, folder: Path, same_tag: bool) -> list[str]:
    """Which weights are loaded after a save was killed before each of its file operations: the old or the new."""
    engine = start(config())
    engine.save_checkpoint(folder, "tag")
    old = engine.module.mixer.weight.detach().clone()
    train(engine, slice(0, 1))
    new = engine.module.mixer.weight.detach().clone()
    again = start(config())
    outcomes = []
    for number in range(100):
        status = killed_at(number, str(folder), lambda: engine.save_checkpoint(folder, "tag" if same_tag else "other"))
        again.module.mixer.weight.data.zero_()
        again.load_checkpoint(folder)
        found = again.module.mixer.weight
        outcomes.append("old" if torch.equal(found, old) else "new" if torch.equal(found, new) else "neither")
        if status == 0:
            break
        assert status == 9, (number, status)
    return outcomes


@pytest.mark.parametrize("same_tag", [True, False])
def test_killed_at_any_moment_the_last_good_one_is_there(tmp_path: Path, same_tag: bool) -> None:
    alone = Ranks()  # a process that nothing has happened in, to be forked
    try:
        (outcomes,) = alone.run(1, kill_everywhere, tmp_path, same_tag)
    finally:
        alone.close()
    assert len(outcomes) > 10
    assert outcomes == sorted(outcomes, reverse=True)  # "old" until it is "new"
    assert set(outcomes) == {"old", "new"}
    assert (
        sorted(path.name for path in tmp_path.iterdir()) == ["latest", "tag"]
        if same_tag
        else ["latest", "other", "tag"]
    )


def beside_another_job(rank: int, folder: Path, tag: str, killed: bool) -> tuple[int, list[str], list[str]]:
    """Save while another process is in the middle of a save to the same folder: its exit status, and what is there
    before it ends, and afterwards, when we have saved once more."""
    engine = start(config())
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        gc.disable()
        try:
            place = Place(folder, "theirs")
            place.open()
            (place.temporary / ".metadata").write_text("theirs")
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            if not killed:
                place.commit(latest=False)
        except BaseException:
            os._exit(1)
        os._exit(0)
    os.read(ready[0], 1)
    engine.save_checkpoint(folder, tag)
    before = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    os.write(go[1], b"x")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for end in (*ready, *go):
        os.close(end)
    engine.save_checkpoint(folder, "again")
    return status, before, sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("tag", "killed"), [("ours", False), ("theirs", False), ("ours", True)])
def test_two_jobs_save_to_one_folder(tmp_path: Path, tag: str, killed: bool) -> None:
    alone = Ranks()  # a process that nothing has happened in, to be forked
    try:
        ((status, before, after),) = alone.run(1, beside_another_job, tmp_path, tag, killed)
    finally:
        alone.close()
    assert status == 0
    assert before == ["latest", tag]
    assert after == ["again", "latest", *sorted({tag} | (set() if killed else {"theirs"}))]
    assert killed or (tmp_path / "theirs" / ".metadata").read_text() == "theirs"


def limited(rank: int, folder: Path) -> str:
    return save_on_small_disk(start(config(2)), rank == 1, folder)


def test_a_rank_that_cannot_write_fails_all_and_loses_nothing(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, limited, tmp_path)
    assert first == second
    assert first.startswith(f"checkpoint bad was not saved to {tmp_path}: rank 1: ")
    assert os.strerror(errno.EFBIG) in first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "latest"]
    assert (tmp_path / "latest").read_text() == "good"


def test_a_write_that_failed_leaves_nothing_that_crashes() -> None:
    """It leaves what was to be written in a cycle; a BytesIO and a view of it in one crash CPython 3.12."""
    assert isinstance(_Value(b"x").getbuffer().obj, bytes)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def filled(rank: int, folder: Path) -> list[str]:
    """What is said when the disk has room for one checkpoint, and when it is read-only."""
    engine = start(config(1))
    engine.save_checkpoint(folder, "good")
    told = []
    for action in (lambda: None, lambda: subprocess.run(["mount", "-o", "remount,ro", folder], check=True)):
        if rank == 0:
            action()
        dist.barrier()
        for save in (lambda: engine.save_checkpoint(folder, "good"), lambda: engine.save_16bit_model(folder)):
            try:
                save()
                told.append("saved")
            except CheckpointError as error:
                told.append(str(error))
    engine.load_checkpoint(folder)
    return told


def test_a_full_and_a_read_only_disk_are_reported_on_all_ranks(ranks: Ranks, small_disk: Path) -> None:
    first, second = ranks.run(2, filled, small_disk)
    assert first == second
    full, model, read_only, _ = first
    assert full.startswith(f"checkpoint good was not saved to {small_disk}: rank ")
    assert "No space left on device" in full
    assert model == "saved"
    assert "rank 0: Read-only file system" in read_only
    assert "choose a folder that can be written" in read_only


def apart(rank: int, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        start(config(1)).save_checkpoint(folder / str(rank), "tag")
    return str(caught.value)


def test_a_folder_that_ranks_do_not_share_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    told = ranks.run(2, apart, tmp_path)
    assert all("the folder must be one that all ranks share" in text for text in told)
    assert not (tmp_path / "0" / "tag").exists()


def damaged(folder: Path, change: Callable[[Path], None]) -> str:
    engine = start(config())
    engine.save_checkpoint(folder, "tag")
    change(folder / "tag")
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder)
    return str(caught.value)


def test_damage_is_reported(tmp_path: Path) -> None:
    def cut_short(path: Path) -> None:
        file = next(path.glob("*.distcp"))
        file.write_bytes(file.read_bytes()[:5000])

    assert "so the file is damaged" in damaged(tmp_path, cut_short)
    assert "No such file" in damaged(tmp_path, lambda path: next(path.glob("*.distcp")).unlink())
    assert ".metadata cannot be read" in damaged(tmp_path, lambda path: (path / ".metadata").write_bytes(b"\x80\x04"))


# --- nothing is run


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


class EvilGetattr(Evil):
    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (str, "join")


def point_at(name: str, evil: Callable[[Path], object]) -> Callable[[Path], None]:
    """Have the description say that `name` is in a file with something else."""

    def change(path: Path) -> None:
        metadata = Contents(path)._metadata
        for index, info in metadata.storage_data.items():
            if index.fqn == name:
                evil(path / "evil.distcp")
                info.relative_path, info.offset = "evil.distcp", 0
                info.length = (path / "evil.distcp").stat().st_size
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    return change


def test_another_format_is_refused() -> None:
    class Old:
        def value(self, name: str) -> bytes:
            return pack({"format": 1}, name)

    with pytest.raises(CheckpointError, match="it has format 1, and this version of dsprof reads 2"):
        about_training(Old())  # type: ignore[arg-type]


def test_pickles_are_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    folder = tmp_path / "folder"
    refusals = [
        damaged(folder, lambda path: (path / ".metadata").write_bytes(pickle.dumps(Evil(mark)))),
        damaged(folder, lambda path: (path / ".metadata").write_bytes(pickle.dumps(EvilGetattr(mark)))),
    ] + [
        damaged(folder, point_at(name, write))
        for name in ("weight/mixer.weight", "training", "client_state", "rank/0")
        for write in (
            lambda path: torch.save({"x": Evil(mark)}, path),
            lambda path: torch.save(Evil(mark), path, _use_new_zipfile_serialization=False),
            lambda path: path.write_bytes(pickle.dumps(Evil(mark))),
        )
    ]
    assert not mark.exists()
    assert "it asks for posix.mkdir" in refusals[0]
    for text in refusals:
        assert "made to run code. Nothing of it was run" in text, text
    pickle.loads(pickle.dumps(Evil(mark)))
    assert mark.exists()  # it would have


def test_a_description_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    def lead_out(path: Path) -> None:
        metadata = Contents(path)._metadata
        next(iter(metadata.storage_data.values())).relative_path = "../../secret"
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    assert "names a file outside of its folder" in damaged(tmp_path, lead_out)


def test_values_are_read_without_running_anything(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"x is a .*Evil"):
        pack(Evil(tmp_path / "ran"), "x")
    with pytest.raises(CheckpointError, match="Nothing of it was run"):
        unpack(pickle.dumps(Evil(tmp_path / "ran")), "x")
    assert not (tmp_path / "ran").exists()


# --- the model alone


def model_saved(rank: int, folder: Path, settings: dict[str, Any], trained: bool) -> bool:
    engine = start(settings, build)
    if trained:
        train(engine, slice(0, 1))
    return engine.save_16bit_model(folder, "model.bin")


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_save_16bit_model_writes_the_whole_model(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    zero = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    settings = config(stage, zero=zero, bf16={"enabled": True})
    for trained in (False, True):
        assert ranks.run(2, model_saved, tmp_path, settings, trained) == [True, True]
        state = torch.load(tmp_path / "model.bin", weights_only=True)
        model = build(torch.bfloat16)
        assert state.keys() == model.state_dict().keys()  # tied weights under both names
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items()) is not trained
        model.load_state_dict(state)
    assert [path.name for path in tmp_path.iterdir()] == ["model.bin"]


def not_gathered(rank: int, folder: Path) -> bool:
    engine = start(config(3))
    with pytest.warns(UserWarning, match="stage3_gather_16bit_weights_on_model_save to true"):
        return engine.save_16bit_model(folder)


def test_sharded_parameters_are_gathered_only_on_demand(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, not_gathered, tmp_path) == [False, False]
    assert list(tmp_path.iterdir()) == []


def test_the_package_exports_what_is_documented() -> None:
    assert sorted(checkpoint.__all__) == [
        "CheckpointError",
        "consolidated",
        "load",
        "save",
        "save_16bit_model",
        "weights_of",
    ]
