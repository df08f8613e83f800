"""A job while it runs, from outside of its training threads: what its captures say, and whether its processes work.

    tail          follows the records of a capture that is being written
    waiting       which rank a job waits for, from what each has issued
    activity      what a process and its children use of CPU, files and TCP, and where the kernel has its threads
    sockets       bytes that the TCP connections of this host have carried
    frames        which frame of a stack is the user's
    kernel_waits  what a thread waits for, by the function of the kernel that it sleeps in

Standard library only: the launcher and the ranks' own watchdog use it, and the analyzer asks `waiting` of a finished
run.
"""
