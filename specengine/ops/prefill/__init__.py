"""Attention of passes over prompts on CUDA."""
