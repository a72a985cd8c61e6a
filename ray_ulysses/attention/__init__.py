"""The Ulysses attention engine: sharded batches, head exchange, kernels, and integration with Hugging Face decoders."""
