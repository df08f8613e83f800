"""Communication: comm.small-messages, comm.large-bucket, comm.exposed, comm.tensor-parallel, comm.redundant-reduce,
comm.buffers, comm.volume, comm.slow-link, comm.blocking, comm.redundant-gather. Each dimension of the job by itself.

collectives       which of the following each dimension is asked
dimensions        what is communicated in each dimension, and how long ranks wait for it
ddp_buckets       gradients reduced in buckets while backward goes on, as by DistributedDataParallel
gradient_division  how gradients are reduced now: their buckets, and of which models they are
possible_links    the link of a process group, and others that it may as well be
by_hand           gradients that a script reduces itself after backward
shards            parameters that are gathered, gradients that are scattered: FSDP, ZeRO stage 3
prefetch          the same, gathered before they are needed
zero_prefetch     and of ZeRO's stage 3, by the engine's own key
engine_reductions  gradients that dsprof's engine reduces beside backward, or waits for, in stages 1 and 2
fetched_parameters  with other limits of what stage 3 gathers ahead, and of how much is whole at once
fsdp_settings     FSDP2 with parameters kept from forward to backward, or more gathered ahead
zero_stage        ZeRO at another stage, and with overlap_comm or without
zero_buckets      DeepSpeed's ZeRO stages 1 and 2
deepspeed_config  what ZeRO's engines were told, and how a fix names the keys of its configuration
redundant_reduce  gradients reduced in each micro-batch of a step
volume            bytes that no division and no overlap hides
quantized         parameters and gradients in whole numbers of 8 and 4 bits: ZeRO++
one_bit           momenta that travel as signs: 1-bit optimizers
fewer_bytes       how a fix has fewer bytes communicated, in the words of the job
slow_link         groups over which the same takes longer than over their peers
blocking          barriers and numbers for a log that the loop itself communicates in each step
redundant_gather  shards that are gathered again though they would fit
buffers           buffers broadcast before each forward
tensor_parallel   what the ranks that share layers communicate
"""
