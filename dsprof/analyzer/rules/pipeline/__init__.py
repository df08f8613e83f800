"""Pipelines: pipeline.imbalance, pipeline.bubble, pipeline.stall.

bubble_and_imbalance  a slow stage, and a bubble that costs more than it needs
stall                 messages that stages wait for, over a slow link or because nobody asks for them early
bubble_causes         why stages wait, in words
structure_fixes       the boundaries and the schedule that they advise
"""
