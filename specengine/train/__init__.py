"""Training drafters: data made by the target itself, losses as published, checkpoints that load into the engine."""
