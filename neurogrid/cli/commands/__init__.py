"""The commands, and what each does for its options."""
