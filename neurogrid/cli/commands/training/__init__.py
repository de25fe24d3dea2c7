"""The words behind `neurogrid train`, one file each, and how they show what a run does."""
