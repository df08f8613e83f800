"""The capture of one rank: who it is of, where it is written, when something is recorded, how it ends.

session         opens a capture, installs the collectors, follows the steps, closes the capture
open_capture    what each collector is given
identity        which rank this process is, and which run folder its capture belongs to
recorder_setup  what a capture is opened with: its folder, the recorder, the size limit
without_helper  what is recorded where there is no native helper
window          which part of the run is captured
step_end        when samples are taken after a step
hook_time       what capturing takes of the job
facts           how DDP, DataLoader and process groups were configured, and on which line of the script
files           facts.jsonl and meta.json of a capture
scratch         where a capture is written: the run folder, a local disk, shared memory
free_space      how much captures may take in a folder
copier          the process that copies a capture into its run folder
without_capture  failures where there is no capture that could say so
side_thread     a thread beside the training, which looks at something now and then
"""
