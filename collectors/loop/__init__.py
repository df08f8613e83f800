"""The training loop: what a step consists of.

phases                  waiting for data, and backward
modules                 forward: the outermost module call; at level full each module
backward                which backward a thread computes, and where DDP begins to wait in it
optimizers              optimizer steps, which end the training step
batch_size              how large a batch is
linear_layers           the sizes of a model's linear layers
loss_scale              steps that a GradScaler skips
pipelining              torch's pipeline schedules: the actions of stages
checkpoints             saving checkpoints
activation_checkpoints  lines whose activations are computed again in backward
compilation             what torch.compile takes for itself
trial                   a trial of `dsprof fix --verify`: it ends after so many steps, and keeps its losses
flops                   floating-point operations of a step
"""
