"""Reach peers and be reached: connections that are kept, relays, hole punching, what NATs let through."""
