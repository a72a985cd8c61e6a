"""Renders a run's plan, progress, summary and history as text for people."""
