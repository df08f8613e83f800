"""Ranks that wait for one another without end, or did for a while.

open_operations  what ranks were waiting for when their captures ended
transient_hang   hangs that resolved themselves
issuing_lines    which line of the script issued a collective that ranks disagree about
"""
