"""fastai: a Learner with its own loaders, mixed callbacks, validation and a saved model after each epoch."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from fastai.basics import DataLoader, DataLoaders, Learner, set_seed
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientAccumulation
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float, default=0.0)
options = parser.parse_args()

set_seed(0, reproducible=True)
source = torch.Generator().manual_seed(1)
samples = torch.randn(960, 512, generator=source)
targets = torch.randn(960, 512, generator=source)


class Pairs:
    def __len__(self) -> int:
        return 960

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(options.seconds)
        return samples[index], targets[index]


train = DataLoader(Pairs(), bs=16, shuffle=True, drop_last=True)
valid = DataLoader([(samples[i], targets[i]) for i in range(64)], bs=16)
layers: list[nn.Module] = []
for _ in range(6):
    layers += [nn.Linear(512, 512), nn.ReLU()]
learner = Learner(DataLoaders(train, valid, device="cpu"), nn.Sequential(*layers), loss_func=nn.MSELoss(), path=".")
with learner.no_bar():
    learner.fit_one_cycle(2, 1e-3, cbs=[GradientAccumulation(32), SaveModelCallback(every_epoch=True)])
Path("losses.0.json").write_text(json.dumps([float(loss) for loss in learner.recorder.losses]))
