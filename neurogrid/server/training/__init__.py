"""API of a leader for its training run: status, figures, journal, checkpoints, and whether it learns."""
