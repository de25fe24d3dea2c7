"""What is known of the cluster, for programs and for the page."""
