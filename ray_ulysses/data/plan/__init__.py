"""The rows of a run, planned before its first step from document lengths and a seed."""
