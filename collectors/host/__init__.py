"""What the host does to a rank.

proc             reading what the kernel tells in /proc and /sys/fs/cgroup
gc_and_cpu_time  garbage collection, CPU time, waiting for a core
machine_load     what else keeps cores, disks and network busy; DataLoader workers
"""
