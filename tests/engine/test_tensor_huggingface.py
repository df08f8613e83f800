"""Models of transformers, cut unaided: random weights from a configuration, nothing is downloaded.

Importing transformers takes seconds, so only the ranks do it.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from ranks import Ranks
from tensor_models import compare, error_of, tensor_comm, token_ids
from torch import Tensor, nn

from dsprof.engine.tensor import TensorPlan, plan_for

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip


def build(name: str) -> tuple[nn.Module, Tensor]:
    """A model, the same in every process, and an input."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    torch.manual_seed(0)
    ids = token_ids(64)
    if name == "gpt2":
        small = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 63}
        config: Any = transformers.GPT2Config(**small, bos_token_id=1, eos_token_id=2)
        return transformers.GPT2LMHeadModel(config), ids % 63
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2)), ids
    if name == "qwen3":
        config = transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)
        return transformers.Qwen3ForCausalLM(config), ids
    if name == "phi3":
        return transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES, num_key_value_heads=2)), ids
    if name == "gpt_neox":
        return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES)), ids
    if name == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)), ids
    assert name == "vit"
    sizes = {key: value for key, value in SIZES.items() if not key.endswith(("_id", "vocab_size"))}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4)
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return transformers.ViTForImageClassification(config), images


def counts(plan: TensorPlan) -> dict[str, int]:
    """Layers of each style."""
    found: dict[str, int] = {}
    for role in plan.roles:
        found[role.style] = found.get(role.style, 0) + 1
    return found


def cut_and_compare(rank: int, names: list[str], sequence: list[str]) -> dict[str, dict[str, int]]:
    comm = tensor_comm()
    found = {}
    for name in names:
        model, inputs = build(name)
        model.eval()
        # Their attention and their norms compute in fp32, whatever the model's precision.
        plan = compare(model, comm, inputs, tolerance=1e-5, plan="derive")
        found[name] = counts(plan)
    for name in sequence:
        model, inputs = build(name)
        compare(model.eval(), comm, inputs, tolerance=1e-5, plan="derive", sequence_parallel=True)
    return found


def test_the_planner_cuts_them_unaided(ranks: Ranks) -> None:
    first, second = ranks.run(2, cut_and_compare, ["gpt2", "llama", "vit", "bert", "phi3"], ["llama", "gpt2"])
    assert first == second
    assert first == {
        "gpt2": {"vocab": 1, "whole": 1, "column": 4, "row": 4, "column_gather": 1},
        "llama": {"vocab": 1, "column": 10, "row": 4, "column_gather": 1},
        "vit": {"column": 8, "row": 4, "whole": 1},
        "bert": {"vocab": 1, "whole": 3, "column": 8, "row": 4, "column_gather": 1},
        "phi3": {"vocab": 1, "column": 4, "row": 4, "column_gather": 1},
    }


@pytest.mark.slow
def test_the_planner_cuts_more_of_them_over_four_ranks(ranks: Ranks) -> None:
    names = ["gpt2", "llama", "qwen3", "gpt_neox", "bert"]
    ranks.run(4, cut_and_compare, [*names, "vit"], names)


def own_plan_and_errors(rank: int) -> list[Any]:
    comm = tensor_comm()
    found: list[Any] = []
    for name in ("llama", "phi3", "qwen3"):
        model, inputs = build(name)
        plan = compare(model.eval(), comm, inputs, tolerance=1e-5)
        found.append([counts(plan), plan.partial[:2]])
    # With a mask over padding, and a loss computed by the model.
    model, ids = build("llama")
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: Tensor) -> Tensor:
            loss: Tensor = self.inner(ids, attention_mask=mask[: len(ids), : ids.shape[1]], labels=ids).loss
            return loss.reshape(1, 1)

    compare(WithLoss(), comm, ids, tolerance=1e-5, example=ids)
    model, _ = build("llama")
    found.append(error_of(lambda: plan_for(model, 3)))
    model, _ = build("phi3")
    found.append(error_of(lambda: plan_for(model, 4, plan="derive")))
    return found


def test_their_own_plans_and_sizes_that_do_not_work(ranks: Ranks) -> None:
    llama, phi3, qwen3, by_three, by_four = ranks.run(2, own_plan_and_errors)[0]
    assert llama[0] == {"vocab": 1, "column": 10, "row": 4, "column_gather": 1}
    assert phi3[0] == {"vocab": 1, "column_gather": 5, "row_split": 4}  # as transformers has it
    assert qwen3[1] == ("model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.k_norm.weight")
    assert "model.layers.0.self_attn.o_proj reads 4 attention heads of model.layers.0.self_attn." in by_three
    assert "which cannot be shared out over 3; sizes that work: 2, 4." in by_three
    assert "some of whose keys and values would be needed on several ranks" in by_four
