"""Ranks that wait for one another without end, or did for a while.

open_operations  how far each rank was when its capture ended; collectives that ranks disagree about
transient_hang   hangs that resolved themselves
issuing_lines    which line of the script issued a collective that ranks disagree about
"""
