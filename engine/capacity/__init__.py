"""What a model of a given shape takes, before anything is loaded. Knows numbers only: no tensors, no files."""
