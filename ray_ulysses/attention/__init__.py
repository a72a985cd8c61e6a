"""The Ulysses attention engine: batches, exchange, kernels, and its place in a Hugging Face decoder."""
