"""Pipelines: pipeline.imbalance, pipeline.bubble.

bubble_and_imbalance  a slow stage, and a bubble that costs more than it needs
structure_fixes       the boundaries and the schedule that they advise
"""
