"""The training loop and what stands around it, without Ray: usable under any launcher."""
