"""Renders a run's plan and README as text, and its report as a self-contained HTML page with plots."""
