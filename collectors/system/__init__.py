"""What the operating system tells.

clock  the clock of all records, and when the process began on it
proc   /proc and /sys/fs/cgroup
"""
