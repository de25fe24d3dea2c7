"""A training run without its network: what it is to do, what that takes, and where it stands.

run_file      what somebody writes, read and checked, every default filled in
estimate      what a run takes: memory, bytes and time
"""
