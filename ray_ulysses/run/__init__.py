"""Everything that a command needs to know of a run without training it."""
