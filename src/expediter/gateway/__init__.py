"""The OpenAI-compatible HTTP API in front of the replicas."""
