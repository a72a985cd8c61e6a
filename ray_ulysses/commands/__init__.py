"""The commands: one module for each, with its options, its call and its output, beside what they share."""
