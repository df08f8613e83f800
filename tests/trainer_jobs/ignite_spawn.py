"""pytorch-ignite: `idist.Parallel` starts the ranks itself; trainer, evaluator, checkpoints by a handler."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Loss
from torch.utils.data import TensorDataset


def training(local_rank: int, slow_rank: int | None) -> None:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(6):
        layers += [torch.nn.Linear(512, 512), torch.nn.ReLU()]
    model = idist.auto_model(torch.nn.Sequential(*layers))
    optimizer = idist.auto_optim(torch.optim.Adam(model.parameters()))
    source = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(1600, 512, generator=source), torch.randn(1600, 512, generator=source))
    loader = idist.auto_dataloader(data, batch_size=64, num_workers=2, shuffle=True, drop_last=True)
    held_out = idist.auto_dataloader(torch.utils.data.Subset(data, range(128)), batch_size=64)
    criterion = torch.nn.MSELoss()
    trainer = create_supervised_trainer(model, optimizer, criterion)
    evaluator = create_supervised_evaluator(model, {"loss": Loss(criterion)})
    losses: list[float] = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def keep(engine: Engine) -> None:
        losses.append(float(engine.state.output))  # type: ignore[arg-type]

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        evaluator.run(held_out)
        losses.append(float(evaluator.state.metrics["loss"]))

    saver: Any = DiskSaver("ignite", create_dir=True, require_empty=False)
    trainer.add_event_handler(
        Events.EPOCH_COMPLETED, Checkpoint({"model": model, "optimizer": optimizer}, saver, n_saved=1)
    )
    if idist.get_rank() == slow_rank:
        trainer.add_event_handler(Events.ITERATION_STARTED, lambda: time.sleep(0.05))
    trainer.run(loader, max_epochs=4)
    Path(f"losses.{idist.get_rank()}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow-rank", type=int)
    with idist.Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(training, parser.parse_args().slow_rank)
