"""The path of a request from the main listener to whoever computes it."""
