"""The OpenAI-compatible API over HTTP; worker/server.py puts it together."""
