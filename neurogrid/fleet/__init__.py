"""A leader's side of its machines: gathering, members, what each is sent, and what becomes of them."""
