"""Layout arithmetic, the sequence-parallel mesh, and its collectives."""
