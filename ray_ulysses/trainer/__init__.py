"""The training loop and its parts, without Ray: usable under any launcher."""
