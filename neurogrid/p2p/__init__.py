"""The transport library."""
