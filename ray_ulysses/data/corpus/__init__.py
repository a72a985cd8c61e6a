"""A prepared corpus on disk: its format, and how it is opened and read."""
