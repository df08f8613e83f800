"""Communication: comm.small-messages, comm.exposed.

ddp_buckets       DistributedDataParallel's buckets, and which of the other two a job is for
shards            parameters that are gathered, gradients that are scattered: FSDP, ZeRO stage 3
zero_buckets      DeepSpeed's ZeRO stages 1 and 2
deepspeed_config  DeepSpeed's buckets, and how a fix names the keys of its configuration
"""
