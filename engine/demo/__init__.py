"""The small model that ships with Octavo, and how it was made: the trainable module, its data, the training run, the comparison of
its parts. Knows the engine's ModelConfig and folder layout; nothing of the engine knows it."""
