"""Where the time went: each moment of each rank's training thread has one label, and the labels sum to the step.

intervals    sets of disjoint time intervals: the arithmetic of every breakdown
labelled_time  time in which every moment has one label, or none
label        what a lane does when: of rows that nest the innermost counts
lanes        what each lane of a rank did, and what its waits were for
stream_waits what a device's stream waited for where that was not told
lane_tasks   copies that were issued to lanes of one rank's own
activity     what a rank did in each step, a few rows of it
step_budget  the parts of each rank's step
parts        which parts are a rank's own work, waiting, training
irregular    ordinary steps, and those that are not
rhythm       what comes again after a fixed number of steps
wall_time    what the run's wall time went into
wait_table   every wait of the training threads as a table
host_load    how busy the hosts' cores are (uncaptured_ranks: who else may run on them)
capture_overhead   what capturing cost the job
"""
