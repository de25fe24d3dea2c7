"""A training run without its network: what it is to do, what that takes, and where it stands.

projection    how far members will be, and how much work makes them finish together
resources     what a leader asks for, what a worker offers, and leases between the two
journal       what happened, in a file that proves it
audit         whether each sample of each epoch was used exactly once, by the journal alone
"""
