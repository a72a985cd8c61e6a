"""What a run tells: the journal that is its truth, and the tracker that shows it."""
