"""A leader's view of its machines, for programs and people to look at."""
