"""Data, backward, optimizers: each as itself, however the script nests them."""

from __future__ import annotations

import os
from pathlib import Path

from armed import both, captured, inside, train

from dsprof.ondisk import Flag


@both
def test_loaders_are_told_apart_even_if_one_was_entered_before_the_capture_opened(native: str, tmp_path: Path) -> None:
    done = train(
        tmp_path,
        """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        data = TensorDataset(torch.ones(8, 2))
        training = DataLoader(data, batch_size=2, num_workers=1)
        test = DataLoader(data, batch_size=4)
        batches = iter(training)
        model = torch.nn.Linear(2, 2)
        for (x,) in batches:
            model(x).sum().backward()
        for (x,) in test:
            pass
        """,
        native=native,
    )
    assert (done.returncode, done.stderr) == (0, "")
    run = captured(tmp_path)
    # The first batch came before the first backward, with which the capture opened; the last call finds no more.
    assert run.told("data", "loader_start") == [("data", 1.0)] * 4 + [("loader_start", 2.0)] + [("data", 2.0)] * 3
    here = f"{tmp_path}/train.py"
    assert [(fact["number"], fact["num_workers"], fact["site"]) for fact in run.of("dataloader")] == [
        (1, 1, f"{here}:5"), (2, 0, f"{here}:6"),
    ]  # fmt: skip


@both
def test_a_closure_inside_a_step_is_recorded_as_anywhere_else(native: str, tmp_path: Path) -> None:
    done = train(
        tmp_path,
        """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        loader = DataLoader(TensorDataset(torch.ones(2, 2)), batch_size=2)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1, max_eval=1)
        def closure():
            ((x,),) = loader
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss
        for _ in range(2):
            optimizer.step(closure)
        """,
        native=native,
    )
    assert (done.returncode, done.stderr) == (0, "")
    run = captured(tmp_path)
    step = [
        ("optimizer", 1.0),
        ("loader_start", 1.0),
        ("data", 1.0),
        ("data", 1.0),
        ("forward", 4.0),
        ("backward", None),
    ]
    assert run.told() == step * 2
    optimizers = run.phases("optimizer")
    for row in run.phases("loader_start", "data", "forward", "backward"):
        assert any(inside(row, optimizer) for optimizer in optimizers)
    assert all(row.flags == Flag.GRAD for row in run.phases("forward"))
    groups = {"groups": 1, "settings": 1, "implementation": None, "elements": 6}
    assert run.of("optimizer") == [{"number": 1, "class": "LBFGS", "parameters": 2, **groups}]


@both
def test_optimizers_are_numbered_in_the_order_of_their_first_steps(native: str, tmp_path: Path) -> None:
    done = train(
        tmp_path,
        """
        import torch
        model = torch.nn.Linear(2, 2)
        inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        class Outer(torch.optim.SGD):
            def step(self, closure=None):
                inner.step()
                return super().step(closure)
        class Odd(torch.optim.SGD):
            __hash__ = None  # it cannot be told again
        critic, actor = torch.optim.Adam(model.parameters()), Outer(model.parameters(), lr=0.1)
        odd = Odd([torch.zeros(1, requires_grad=True)], lr=0.1)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            actor.step()
            critic.step()
        odd.step()
        """,
        native=native,
    )
    assert (done.returncode, done.stderr) == (0, "")
    run = captured(tmp_path, errors=["an optimizer's number: TypeError: unhashable type: 'Odd'"])
    assert [value for _, value in run.told("optimizer")] == [1.0, 2.0, 1.0, 2.0, None]
    assert [(fact["number"], fact["class"]) for fact in run.of("optimizer")] == [(1, "Outer"), (2, "Adam")]


@both
def test_optimizers_stepped_in_backward_are_steps_and_the_host_is_sampled_once(native: str, tmp_path: Path) -> None:
    done = train(
        tmp_path,
        """
        import torch
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        """,
        native=native,
    )
    assert (done.returncode, done.stderr) == (0, "")
    run = captured(tmp_path)
    first, second = run.phases("backward")
    steps = run.phases("optimizer")
    assert [row.value for row in steps] == [1.0, 2.0, 3.0, 4.0] * 2
    assert (
        [inside(row, first) for row in steps] == [not inside(row, second) for row in steps] == [True] * 4 + [False] * 4
    )
    samples = [row for row in run.rows if row.name == "cpu_seconds"]
    assert len(samples) == 2
    assert samples[0].start_ns > first.end_ns


@both
def test_backward_shows_that_a_loop_without_an_optimizer_trains(native: str, tmp_path: Path) -> None:
    done = train(
        tmp_path,
        """
        import torch
        weight = torch.ones(2, requires_grad=True)
        for _ in range(3):
            (gradient,) = torch.autograd.grad((weight * weight).sum(), weight)
            weight = (weight - 0.1 * gradient).detach().requires_grad_()
        print(weight.sum().item())
        """,
        native=native,
    )
    assert (done.returncode, done.stderr) == (0, "")
    run = captured(tmp_path)
    assert run.told() == [("backward", None)] * 3
    (process,) = run.of("process")
    assert process["cpus"] == sorted(os.sched_getaffinity(0))
    assert process["cores"] == len(process["cpus"])
    clock = run.meta["clock"]
    assert clock["process_start_ns"] < run.meta["opened_ns"] < run.phases()[0].start_ns
    assert run.phases()[-1].end_ns <= run.meta["closed_ns"] < clock["process_start_ns"] + 200e9


@both
def test_who_never_trains_is_not_captured(native: str, tmp_path: Path) -> None:
    done = train(
        tmp_path,
        """
        import torch
        from torch.utils.data import DataLoader, Dataset
        class Gradients(Dataset):
            def __len__(self):
                return 2
            def __getitem__(self, index):
                x = torch.ones(2, requires_grad=True)
                x.sum().backward()
                return x.grad
        assert sum(float(batch.sum()) for batch in DataLoader(Gradients(), num_workers=1)) == 4
        with torch.no_grad():
            torch.nn.Linear(2, 2)(torch.ones(1, 2))
        """,
        native=native,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list((tmp_path / "run").iterdir()) == []
