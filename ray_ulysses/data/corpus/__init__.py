"""The format of a prepared corpus on disk, and its readers."""
