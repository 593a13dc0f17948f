"""Trains drafters on text that the target writes, with published losses, into checkpoints that the engine loads."""
