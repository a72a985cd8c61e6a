"""Tests on several processes: CPU, gloo, and a hang timeout on each."""
