"""The feature store: schema, reads of requests, batched writes of the stream worker and the pipeline, explanations."""
