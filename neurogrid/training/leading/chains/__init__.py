"""The leader of a run whose model lies in a chain of stages.

lead      opens all that it needs
leader    arrangements of members as stages, and steps
members   its workers: asked, started, listened to
weights   what stages begin with
numbers   how large they are, from a config alone
state     what is kept of them on the way
keeper    journal, figures, checkpoints
"""
