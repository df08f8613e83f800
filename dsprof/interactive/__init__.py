"""Runs in a notebook, or in any Python program: `dsprof.load` and `dsprof.profile`.

loaded_run   a run: its tables, findings, what-ifs, figures
run_tables   the tables, and what each of their columns is
run_plots    the figures
questions    what-ifs, asked and answered
comparison   two runs beside each other
planned      what it would do on other ranks
profiled     `with dsprof.profile("name") as run:`
in_cells     how they are shown in a notebook's cells
"""
