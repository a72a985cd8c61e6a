"""Plans the rows of a run before its first step, from document lengths and a seed."""
