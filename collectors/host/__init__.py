"""What the host does to a rank.

gc_and_cpu_time  garbage collection, CPU time, waiting for a core
hindrances       what keeps the process from running: a CPU quota, want of memory, its own other threads
machine_pace     what makes a machine slower than others: clocks of cores, nodes of memory, the network
stack_samples    where the training thread is, some times a second
machine_load     what else keeps cores, disks and network busy; DataLoader workers
"""
