"""sentence-transformers' trainer, as its documentation has it: pairs of sentences, evaluation, checkpoints."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from datasets import load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer

parser = argparse.ArgumentParser()
parser.add_argument("language", type=Path)
parser.add_argument("--save-steps", type=int, default=20)
parser.add_argument("--slow-rank", type=int)
options = parser.parse_args()

torch.manual_seed(0)
words = Transformer(str(options.language / "model"))
model = SentenceTransformer(modules=[words, Pooling(words.get_word_embedding_dimension())])
files = {split: str(options.language / "preferences" / f"{split}.jsonl") for split in ("train", "test")}
pairs = load_dataset("json", data_files=files).remove_columns("rejected")
arguments = SentenceTransformerTrainingArguments(
    output_dir="sentences", use_cpu=True, num_train_epochs=1, max_steps=40, per_device_train_batch_size=4,
    eval_strategy="steps", eval_steps=20, save_steps=options.save_steps, save_total_limit=1, logging_steps=1,
    report_to=[], disable_tqdm=True,
)  # fmt: skip
trainer = SentenceTransformerTrainer(
    model=model, args=arguments, train_dataset=pairs["train"], eval_dataset=pairs["test"],
    loss=MultipleNegativesRankingLoss(model),
)  # fmt: skip
if trainer.args.process_index == options.slow_rank:
    words.register_forward_hook(lambda *_: time.sleep(0.03))
trainer.train()
