"""The coordinator's way through the stages: sessions over workers, chains, prompts in pieces, recovery of a step."""
