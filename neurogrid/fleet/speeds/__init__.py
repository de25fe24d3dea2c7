"""How fast members turn out to be, and when that changes a plan."""
