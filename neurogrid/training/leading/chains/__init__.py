"""The leader of a run whose model lies in a chain of stages, or in several replicas.

lead       opens all that it needs
leader     a chain: members as stages, and its steps
arranging  who is in which stage, and with what it begins
orders     what members are told of that
replicas   the leader of several chains: rounds of steps, and what they average
replica    one of them, in a round
forming    replicas that load their layers while the others go on
members    workers: asked, started, listened to
weights    what stages begin with
sums       of what members tell, whatever they tell
numbers    how large they are, from a config alone
state      what is kept of them on the way
model_files  a state as a whole model, for transformers
keeper     journal, figures, checkpoints
"""
