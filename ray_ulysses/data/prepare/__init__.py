"""The steps from sources to a committed corpus, unit by unit and resumable."""
