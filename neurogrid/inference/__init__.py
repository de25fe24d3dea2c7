"""Generation over the stages of a fleet: the coordinator's side, and the sessions of a worker."""
