"""The HTTP server: OpenAI's completions over the runtime."""
