"""Options that commands share, and what they come to."""
