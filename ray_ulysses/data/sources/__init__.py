"""The user's files and data sets: listed, cut into units of work, and read document by document."""
