"""The state of the cluster, for programs and for the page."""
