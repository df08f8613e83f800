"""DeepSpeed's automatic tensor parallelism of a Hugging Face model, over both ranks."""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from steps import BATCH, STEPS, use_gloo_only, write_losses
from transformers import LlamaConfig, LlamaForCausalLM

WORDS, LENGTH = 32, 16

use_gloo_only()
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0,
    )
)  # fmt: skip
config = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "tensor_parallel": {"autotp_size": 2},
    "zero_optimization": {"stage": 0},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
generator = torch.Generator().manual_seed(1)
losses = []
for _ in range(STEPS):
    words = torch.randint(WORDS, (BATCH, LENGTH), generator=generator)
    loss = engine(input_ids=words, labels=words).loss
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
write_losses(losses)
dist.destroy_process_group()
