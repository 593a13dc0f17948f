"""Readers of quantised safetensors checkpoints, one family of formats per file."""
