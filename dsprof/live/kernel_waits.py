"""What a thread waits for by the kernel's view of it: the function that it sleeps in (`/proc/PID/task/TID/wchan`)."""

from __future__ import annotations

import re
from typing import Final

WAITS: Final = (
    (r"nanosleep", "sleeps for a set time"),
    (r"flock|fcntl_setlk|posix_lock|locks_lock|locks_mandatory", "waits for a lock of a file"),
    (r"futex", "waits for a lock or for another thread"),
    (r"epoll|ep_poll|sys_poll|do_poll|poll_schedule|do_select|pselect", "waits for sockets, pipes or a timer"),
    (r"pipe_read|pipe_wait", "waits for what another process writes into a pipe"),
    (r"pipe_write", "waits until another process reads from a pipe"),
    (r"accept", "waits for a connection"),
    (r"sk_wait_data|tcp_recv|inet_recv|unix_stream|wait_for_more_packets|wait_woken|sock_recv",
     "waits for data of a socket"),
    (r"stream_wait_memory|sock_alloc_send|sock_wait_for_wmem|tcp_send",
     "waits until the other side of a socket takes data"),
    (r"kernel_wait|do_wait|wait4|waitid|wait_consider", "waits for a child process to end"),
    (r"rpc_wait|nfs", "waits for a file server (NFS)"),
    (r"ptlrpc|lustre|^ll_|^cl_|^osc_", "waits for a file server (Lustre)"),
    (r"ceph", "waits for a file server (Ceph)"),
    (r"fuse|request_wait_answer", "waits for a file system in user space (FUSE)"),
    (r"io_schedule|page_bit|folio|wait_on_page|wait_on_buffer|blk_|bio_|jbd2|ext4|xfs|btrfs|io_uring|io_cqring|read_events",
     "waits for a disk"),
    (r"signal_stop|ptrace|get_signal", "is stopped, by a signal or a debugger"),
    (r"sigtimedwait|sigsuspend|sys_pause", "waits for a signal"),
    (r"rwsem|down_read|down_write|mutex_lock|mmap", "waits for a lock inside the kernel"),
    (r"^nv|uvm|_nv[0-9]", "waits in the NVIDIA driver"),
    (r"amdgpu|kfd", "waits in the AMD GPU driver"),
)  # fmt: skip
"""Functions of the kernel, of many versions of it, and what a thread in them does; the first that fits."""
STATES: Final = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a device or a file system, and cannot be interrupted",
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "X": "has ended",
}
"""Of proc(5)."""


def in_the_kernel(wchan: str, state: str) -> str:
    """`sleeps for a set time (in the kernel: hrtimer_nanosleep)`; by the thread's state alone where no function may be
    read."""
    if not wchan or wchan == "0":
        return STATES.get(state, "does what the kernel does not tell")
    words = next((said for pattern, said in WAITS if re.search(pattern, wchan)), None)
    return f"{words or 'waits for something'} (in the kernel: {wchan})"
