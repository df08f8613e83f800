"""Pipelines: pipeline.imbalance, pipeline.bubble.

bubble_and_imbalance  a slow stage, and a bubble that costs more than it needs
measured_layers       another division of the layers, by what they and the ranks were measured to take
"""
