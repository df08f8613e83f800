"""Communication: collectives, sends and receives, the waits for them, and what they are for.

collectives         every operation of c10d
collective_kernels  what comes before c10d's operators, where there is no native helper
collective_rows     what these record
completion_thread   the thread of the recorder in Python that waits for collectives to end
waits               where a thread stands still for communication
call_sites          which lines of the script issue which collectives
process_groups      which process groups there are
purposes            what a call communicates for
sharding            how FSDP was configured, and what it does for each of its units
symmetric_memory    that ranks communicate where none of it is seen
tensor_parallel     which groups are for tensor parallelism
"""
