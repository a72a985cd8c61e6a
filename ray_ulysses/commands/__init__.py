"""The commands: one module each for options, call and output, and modules that they share."""
