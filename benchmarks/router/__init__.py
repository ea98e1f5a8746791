"""Routers beside each other before the same mock backends."""
