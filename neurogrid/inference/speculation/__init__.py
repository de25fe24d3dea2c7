"""Speculation: tokens that are proposed before the model has chosen them, and how many of them pay. Without network."""
