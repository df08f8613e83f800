"""diffusers' unconditional training as its tutorial has it: Accelerate, accumulation, an average of the weights."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--save-every", type=int, default=20)
options = parser.parse_args()

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_dir="diffusion")
model = UNet2DModel(
    sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=8,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)  # fmt: skip
average = EMAModel(model.parameters(), decay=0.99)
noise_scheduler = DDPMScheduler(num_train_timesteps=100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
pictures = torch.randn(480, 3, 16, 16, generator=torch.Generator().manual_seed(1))
loader = DataLoader(pictures, batch_size=4, shuffle=True)  # type: ignore[arg-type]
schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=100)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
losses: list[float] = []
step = 0
for _epoch in range(options.epochs):
    for clean in loader:
        noise = torch.randn_like(clean)
        timesteps = torch.randint(0, 100, (len(clean),))
        noisy = noise_scheduler.add_noise(clean, noise, timesteps)
        with accelerator.accumulate(model):
            predicted = model(noisy, timesteps, return_dict=False)[0]
            loss = F.mse_loss(predicted, noise)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.detach().item())
        if accelerator.sync_gradients:
            average.step(model.parameters())
            step += 1
            if step % options.save_every == 0:
                accelerator.save_state("diffusion/checkpoint")
    if accelerator.is_main_process:
        pipeline = DDPMPipeline(unet=accelerator.unwrap_model(model), scheduler=noise_scheduler)
        pipeline.set_progress_bar_config(disable=True)
        images = pipeline(batch_size=1, num_inference_steps=10, output_type="np").images
        losses.append(float(images.mean()))
Path(f"losses.{accelerator.process_index}.json").write_text(json.dumps(losses))
accelerator.end_training()
