"""The training of the embedded model: its corpus, and its recipe."""
