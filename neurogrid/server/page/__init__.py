"""The page, and the files that it is made of."""
