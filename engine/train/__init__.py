"""The engines, and what a step is made of.

base_engine      what both engines are: a training, its steps, its metrics, its checkpoints
engine           a model that runs as one: forward, backward, step
pipeline_engine  a model in stages: train_batch, eval_batch
optimizer_step   norm, overflow, clipping, update, and the new weights to where they are needed; torch's functions that
                 clip gradients, which find none there
metrics          what is reported after a step
deepspeed_api    DeepSpeed's names, in tables
settings         the same of the configuration
"""
