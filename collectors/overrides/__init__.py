"""The rank's half of `dsprof run --set KEY=VALUE`: knobs that are turned without an edit of the job.

install      reads DSPROF_SET when the process is armed, and has each key applied by the module that knows it
override     a key with its value, and how it is told what became of it
arguments    gives arguments of a class or function other values
ddp          DistributedDataParallel
fsdp2        fully_shard
loader       DataLoader
pipelining   torch.distributed.pipelining's schedules
optimizers   torch.optim
compilation  torch.compile
host         garbage collection, cores
trainers     what Trainer, Accelerator and Lightning's Trainer take
json_config  the JSON configuration of DeepSpeed and of dsprof's engine

Each module has `install(overrides)`, which is given its own keys. `dsprof.knobs` says what the keys mean.
"""
