"""Parts of `benchmarks.train` that do not go through the pipeline's stage."""
