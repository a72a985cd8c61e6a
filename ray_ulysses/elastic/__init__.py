"""Failure handling as pure functions: root causes, restarts, hangs, preemption notices and worker placement."""
