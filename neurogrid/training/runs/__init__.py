"""A training run without its network: what it is to do, what that takes, and where it stands.

run_file         what somebody writes, read and checked, every default filled in
run_directory    where a run is kept
estimate         what a run takes: memory, bytes and time
projection       how much work makes members finish together
resources        what workers offer and leaders lease
entries, journal, audit    what happened, so that nobody can say otherwise
verdict          whether a journal is whole, and what its run came to
changes          values of the run file that are changed while the run goes on
terms            who leads, when the leader may be dead
state, machine   what a run has come to, and what comes next
alarms, learning, tracker   whether it learns, and what its figures say
outer_state, common_steps, methods    the common weights
trainers         what a run file says to a trainer
"""
