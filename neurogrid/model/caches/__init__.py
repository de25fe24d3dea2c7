"""KV caches and recurrent states: of one sequence, and of the rows of a batch."""
