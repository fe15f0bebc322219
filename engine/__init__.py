"""The Octavo engine: paged KV cache, continuous batching and the model. Knows nothing of HTTP or Prometheus."""
