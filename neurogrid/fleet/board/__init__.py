"""What a leader knows of its machines, for those who look."""
