"""A language of 64 words: a tiny model with random weights, its tokenizer, texts and preferences, into a directory."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
WORDS = [f"w{number}" for number in range(60)]


def write_model(out: Path) -> None:
    model = WordLevel({word: number for number, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(out)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(out)


def sentence(source: random.Random) -> str:
    return " ".join(source.choices(WORDS, k=source.randint(40, 60)))


def write_texts(out: Path) -> None:
    source = random.Random(0)
    for kind in ("texts", "preferences"):
        (out / kind).mkdir(parents=True)
        for split, count in (("train", 512), ("test", 16)):
            with (out / kind / f"{split}.jsonl").open("w") as file:
                for _ in range(count):
                    names = ["text"] if kind == "texts" else ["prompt", "chosen", "rejected"]
                    print(json.dumps({name: sentence(source) for name in names}), file=file)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_model(folder / "model")
    write_texts(folder)
