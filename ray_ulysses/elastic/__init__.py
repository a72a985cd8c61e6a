"""How much a run puts up with, and what of it was the cause: pure policy that acts on nothing."""
