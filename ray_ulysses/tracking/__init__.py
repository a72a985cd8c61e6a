"""Records of a run: the journal, which is the truth, and the tracker, which shows it."""
