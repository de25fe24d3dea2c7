"""Training together: what a group of machines agrees on, and what they compute between two agreements."""
