"""What a run trained on, looked at afterwards: any row of it, the lineage of its plan, and the proof of law 3."""
