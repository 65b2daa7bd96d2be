"""The engine against transformers and vLLM on the same machine, in one run."""
