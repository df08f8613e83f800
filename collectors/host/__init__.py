"""What the host does to a rank.

gc_and_cpu_time  garbage collection, CPU time, waiting for a core
machine_load     what else keeps cores, disks and network busy; DataLoader workers
"""
