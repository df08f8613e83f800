"""Models of transformers, sharded unaided: random weights from a configuration, nothing is downloaded.

Importing transformers takes seconds, so only the ranks do it.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from ranks import Ranks
from tensor_models import compare, compare_gradients, error_of, tensor_comm, token_ids
from torch import Tensor, nn

from dsprof.engine.planner.tracer import tensors_of
from dsprof.engine.tensor import PlanError, TensorPlan, parallelize, plan_for

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


def test_layers_are_found_from_the_computation_alone(ranks: Ranks) -> None:
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
def test_layers_are_found_over_four_ranks(ranks: Ranks) -> None:
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


def test_a_models_own_plan_is_taken_and_sizes_that_do_not_work_are_refused(ranks: Ranks) -> None:
    llama, phi3, qwen3, by_three, by_four = ranks.run(2, own_plan_and_errors)[0]
    assert llama[0] == {"vocab": 1, "column": 10, "row": 4, "column_gather": 1}
    assert phi3[0] == {"vocab": 1, "column_gather": 5, "row_split": 4}  # as transformers has it
    assert qwen3[1] == ("model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.k_norm.weight")
    assert "model.layers.0.self_attn.o_proj reads 4 attention heads of model.layers.0.self_attn." in by_three
    assert "which cannot be shared out over 3; sizes that work: 2, 4." in by_three
    assert "some of whose keys and values would be needed on several ranks" in by_four


# --- a wide choice of their models

TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2}
IMAGE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "image_size": 16, "patch_size": 4}  # fmt: skip
TWO_STACKS = {"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
              "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 2,
              "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1}  # fmt: skip
CLIP = {"text_config": {**TEXT, "max_position_embeddings": 16, "projection_dim": 16},
        "vision_config": {**IMAGE, "projection_dim": 16}, "projection_dim": 16}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    # Model -> configuration, its sizes, and how many layers are sharded over two ranks.
    "MistralForCausalLM": ("MistralConfig", {**GROUPED, "sliding_window": 4}, 16),
    "Qwen2ForCausalLM": ("Qwen2Config", GROUPED, 16),
    "Gemma2ForCausalLM": ("Gemma2Config", {**GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16}, 16),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {**GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16}, 16),
    "PhiForCausalLM": ("PhiConfig", TEXT, 14),
    "OPTForCausalLM": ("OPTConfig", {**TEXT, "ffn_dim": 48, "max_position_embeddings": 32, "word_embed_proj_dim": 32},
                       14),
    "GPTJForCausalLM": ("GPTJConfig", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4,
                                       "n_positions": 32}, 14),
    "Starcoder2ForCausalLM": ("Starcoder2Config", GROUPED, 14),
    "CohereForCausalLM": ("CohereConfig", {**GROUPED, "use_qk_norm": True}, 16),
    "Olmo2ForCausalLM": ("Olmo2Config", GROUPED, 8),  # its norms are over all heads
    "GptOssForCausalLM": ("GptOssConfig", {**GROUPED, "head_dim": 8, "num_local_experts": 4}, 10),
    "MixtralForCausalLM": ("MixtralConfig", {**GROUPED, "num_local_experts": 4}, 10),
    "FalconForCausalLM": ("FalconConfig", {**TEXT, "new_decoder_architecture": True, "num_kv_heads": 2}, 10),
    "MambaForCausalLM": ("MambaConfig", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
                                         "state_size": 8}, 2),
    "RobertaForMaskedLM": ("RobertaConfig", {**TEXT, "max_position_embeddings": 40}, 14),
    "DebertaForMaskedLM": ("DebertaConfig", {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, 14),
    "T5ForConditionalGeneration": ("T5Config", {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48,
                                   "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}, 19),
    "BartForConditionalGeneration": ("BartConfig", {**TWO_STACKS, "max_position_embeddings": 32}, 35),
    "WhisperForConditionalGeneration": ("WhisperConfig", {**TWO_STACKS, "num_mel_bins": 8, "max_source_positions": 16,
                                        "max_target_positions": 16}, 34),
    "CLIPModel": ("CLIPConfig", CLIP, 25),
    "DeiTForImageClassification": ("DeiTConfig", IMAGE, 12),
    "SwinForImageClassification": ("SwinConfig", {"image_size": 32, "patch_size": 4, "embed_dim": 16,
                                   "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}, 12),
}  # fmt: skip
SAMPLE = ["GptOssForCausalLM", "DebertaForMaskedLM", "SwinForImageClassification", "WhisperForConditionalGeneration",
          "FalconForCausalLM", "CLIPModel"]  # fmt: skip


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model, the same in every process, and its inputs."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    torch.manual_seed(0)
    config, sizes, _ = MODELS[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes)).eval()
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        if not param.any():  # nothing would be seen of what is applied to nothing
            nn.init.uniform_(param, -0.1, 0.1, generator=generator)
    inputs: dict[str, Tensor] = {}
    if name == "CLIPModel" or "image_size" in sizes:
        inputs["pixel_values"] = torch.rand(2, 3, *[sizes.get("image_size", 16)] * 2, generator=generator)
    if name.startswith("Whisper"):
        inputs["input_features"] = torch.rand(2, 8, 32, generator=generator)
    elif "image_size" not in sizes:
        inputs["input_ids"] = token_ids(64).clamp(min=3)
    if name.endswith("ConditionalGeneration"):
        inputs["decoder_input_ids"] = token_ids(64)[:, :6].clamp(min=3)
    return model, inputs


def cut_in_fp32(rank: int, names: list[str]) -> dict[str, int]:
    """For the sake of experts and of masks that know nothing else."""
    comm = tensor_comm()
    found = {}
    for name in names:
        whole, inputs = made(name)
        cut = copy.deepcopy(whole)
        try:
            plan = parallelize(cut, comm, "derive")
        except PlanError as error:
            raise AssertionError(f"{name}: {error}") from error
        expected, got = tensors_of(whole(**inputs)), tensors_of(cut(**inputs))
        weights = [torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) for x in expected]
        for one, other in zip(expected, got, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
        for outputs in (expected, got):
            torch.stack([(x * w).sum() for x, w in zip(outputs, weights, strict=True)]).sum().backward()
        for one, other in zip(whole.parameters(), cut.parameters(), strict=True):
            if one.grad is None and other.grad is not None and not other.grad.any():
                other.grad = None  # of experts that no token chose
        largest = max(float(x.grad.abs().max()) for x in whole.parameters() if x.grad is not None)
        compare_gradients(whole, cut, comm, 1e-4 * max(1.0, largest))
        found[name] = sum(role.style != "whole" for role in plan.roles)
    return found


def test_models_with_experts_windows_and_two_stacks_compute_the_same(ranks: Ranks) -> None:
    assert ranks.run(2, cut_in_fp32, SAMPLE)[0] == {name: MODELS[name][2] for name in SAMPLE}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in SAMPLE])
def test_each_model_computes_the_same(ranks: Ranks, name: str) -> None:
    assert ranks.run(2, cut_in_fp32, [name])[0] == {name: MODELS[name][2]}


@pytest.mark.slow
def test_transformers_models_over_four_ranks(ranks: Ranks) -> None:
    names = [name for name in MODELS if not name.startswith(("Falcon", "Swin"))]
    for first in range(0, len(names), 5):
        ranks.run(4, cut_in_fp32, names[first : first + 5])


@pytest.mark.slow
def test_what_is_refused_of_transformers_is_named() -> None:
    """Slopes of ALiBi are made for all heads outside the attention."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    message = error_of(lambda: plan_for(transformers.BloomForCausalLM(config), 2))
    assert message.startswith(
        "tensor parallelism: cannot find out how to shard transformer.h.0.self_attention: over 2 ranks"
    )
    assert message.endswith('whole with a plan: {"transformer.h.*.self_attention": "whole", "*": "auto"}')
    whole = {"transformer.h.*.self_attention": "whole", "*": "auto"}
    found = _styles(plan_for(transformers.BloomForCausalLM(config), 2, plan=whole))
    assert found["transformer.h.1.mlp.dense_4h_to_h"] == "row"


def _styles(plan: TensorPlan) -> dict[str, str]:
    return {role.module: role.style for role in plan.roles}
