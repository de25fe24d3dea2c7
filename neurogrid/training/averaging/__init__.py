"""Averaging that agrees: a round is applied by all of its members with the same bits, or by none."""
