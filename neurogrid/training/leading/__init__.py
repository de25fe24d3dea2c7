"""The side of a run that leads it.

settings         what the leader and a data node are told, and what they tell
model_numbers    how large a model is, from its config alone
"""
