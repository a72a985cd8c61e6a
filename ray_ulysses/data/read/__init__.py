"""The rows of a step as each rank receives them, and the digest of what it received."""
