"""Chats: their requests, prompts, constraints and answers."""
