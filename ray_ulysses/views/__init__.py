"""What a person sees: a run's plan, its progress, its summary and its history, as text."""
