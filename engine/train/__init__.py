"""The engines, and what a step is made of.

engine: one model. pipeline_engine: a model in stages. optimizer_step: norm, overflow, clipping, update, new weights.
metrics: what is reported after a step. grid: a rank's place by Megatron's names. deepspeed_api: DeepSpeed's names.
"""
