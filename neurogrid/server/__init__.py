"""The HTTP server: the OpenAI API, what is known of the cluster, and the page."""
