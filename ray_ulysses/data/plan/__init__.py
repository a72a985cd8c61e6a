"""Plans a run's rows before the first step, from document lengths and a seed."""
