"""What the kernel says of a thread, in words."""

from __future__ import annotations

import pytest

from dsprof.live.kernel_waits import in_the_kernel


@pytest.mark.parametrize(
    ("wchan", "state", "words"),
    [
        ("hrtimer_nanosleep", "S", "sleeps for a set time (in the kernel: hrtimer_nanosleep)"),
        ("futex_wait_queue", "S", "waits for a lock or for another thread (in the kernel: futex_wait_queue)"),
        ("futex_do_wait", "S", "waits for a lock or for another thread (in the kernel: futex_do_wait)"),
        ("do_epoll_wait", "S", "waits for sockets, pipes or a timer (in the kernel: do_epoll_wait)"),
        ("ep_poll", "S", "waits for sockets, pipes or a timer (in the kernel: ep_poll)"),
        ("poll_schedule_timeout.constprop.0", "S",
         "waits for sockets, pipes or a timer (in the kernel: poll_schedule_timeout.constprop.0)"),
        ("pipe_read", "S", "waits for what another process writes into a pipe (in the kernel: pipe_read)"),
        ("unix_stream_read_generic", "S", "waits for data of a socket (in the kernel: unix_stream_read_generic)"),
        ("inet_csk_accept", "S", "waits for a connection (in the kernel: inet_csk_accept)"),
        ("do_wait", "S", "waits for a child process to end (in the kernel: do_wait)"),
        ("folio_wait_bit_common", "D", "waits for a disk (in the kernel: folio_wait_bit_common)"),
        ("rpc_wait_bit_killable", "D", "waits for a file server (NFS) (in the kernel: rpc_wait_bit_killable)"),
        ("nfs_wait_on_request", "D", "waits for a file server (NFS) (in the kernel: nfs_wait_on_request)"),
        ("flock_lock_inode_wait", "S", "waits for a lock of a file (in the kernel: flock_lock_inode_wait)"),
        ("do_signal_stop", "T", "is stopped, by a signal or a debugger (in the kernel: do_signal_stop)"),
        ("__mutex_lock", "D", "waits for a lock inside the kernel (in the kernel: __mutex_lock)"),
        ("frobnicate", "S", "waits for something (in the kernel: frobnicate)"),
        ("0", "R", "runs"),
        ("", "S", "sleeps"),
        ("", "", "does what the kernel does not tell"),
    ],
)  # fmt: skip
def test_in_words(wchan: str, state: str, words: str) -> None:
    assert in_the_kernel(wchan, state) == words
