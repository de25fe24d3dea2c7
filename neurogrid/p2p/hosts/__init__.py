"""Hosts: what listens and dials, whoever does it; identities, addresses and what a machine is called."""
