"""What a KV format costs in quality, measured on text. Runs the engine's own parts; knows nothing of scheduling or HTTP."""
