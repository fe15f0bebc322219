"""Runs a StepPlan on the device: builds the batch, calls the model, draws the tokens.

Knows tensors and the model. Does not know queues, block ownership or text.
"""
