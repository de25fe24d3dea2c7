"""Networks made for a test: namespaces, cables and switches, and real processes in them."""
