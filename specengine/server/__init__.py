"""An HTTP server for OpenAI clients: `specengine serve` (extra `serve`)."""
