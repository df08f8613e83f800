"""Ranks that hang or die.

watchdog            where each thread stands once nothing has been recorded for the time-out
thread_stacks       where the Python threads of this process stand
uncaught_exception  the exception that ends a rank
before_capture      the same of one that has no capture yet
"""
