"""Speeds that members turn out to have, and the changes of a plan that come of them."""
