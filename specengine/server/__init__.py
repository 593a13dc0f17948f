"""An HTTP server for OpenAI's clients: `specengine serve` (extra `serve`)."""
