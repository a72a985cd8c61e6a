"""Everything that a command needs to know about a run without training it."""
