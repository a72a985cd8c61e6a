"""The data plane: corpus format and preparation, packing plan, cursor, and the rows a rank receives."""
