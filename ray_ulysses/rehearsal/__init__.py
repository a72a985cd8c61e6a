"""Rehearsals, but for what touches a cluster: the faults of a schedule, what each has cost, and what must hold."""
