"""The run itself, its ranks, and what interrupts its steps: run.*, rank.straggler, pause.*, checkpoint.stall,
eval.uneven, config.invalid, precision.overflow.

rank_died          a rank that ended before its time
hang_and_desync    ranks that wait for one that does not come, or disagree about a collective
slow_rank          one rank is slower than its peers, step after step
slow_chain         the same where devices lead: its host is late, or its device takes longer
unequal_shares     samples by speed, which the engine can give a slow rank
late_cause         why a rank is late: a CPU quota, no core, its other threads, want of memory, a disk
slow_machine       the same of its machine: clocks held down, memory on another node, a slow network
cause              a cause, and what it is held against
late               who of several takes longer for the same work
late_pattern       when: always, for a while, in turn, or now and then
gc_and_stops       garbage collection, and stops that are none of the known kinds
checkpoint_stall   saving checkpoints while training stands still
uneven_evaluation  evaluation that some ranks do while the others wait
overflow           steps that are skipped as gradients overflow in fp16
config_invalid     keys of the configuration that do nothing
"""
