"""What a leader serves of its training run: status, figures, journal, checkpoints, and whether it learns."""
