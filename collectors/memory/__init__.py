"""Memory of the process and of its devices: how much, what for, and who held it when there was none left.

memory_sampler  samples memory after steps
process_memory  the process's memory as the kernel counts it, and what limits it
cuda_memory     all that is asked of CUDA
live_tensors    what a rank's tensors are for: parameters, gradients, states of optimizers
cuda_history    the allocation history of CUDA, and snapshots of its allocators
out_of_memory   where a rank ran out of memory, and who held what it had
"""
