"""Parts that the process of a coordinator and that of a worker share: finding, reaching, roles, directories, events."""
