"""Generations on the coordinator: text to tokens, sampling, sessions that are kept, prefixes that are shared."""
