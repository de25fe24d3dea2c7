"""What the project itself needs now and then; not in the wheel."""
