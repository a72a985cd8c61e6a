"""The record of a run: the journal, which is authoritative, and the trackers, which display it."""
