"""What one framework needs beyond what every job has.

deepspeed      DeepSpeed's engine: what it reduces, gathers and updates
dsprof_engine  dsprof's own engine: the events that it reports
"""
