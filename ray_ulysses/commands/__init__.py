"""Command-line commands: one module per command, with its options, call and output, and shared modules."""
