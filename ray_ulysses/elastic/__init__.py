"""Pure policy on failures: their root causes, and how many of them a run survives."""
