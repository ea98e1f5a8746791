"""Expediter: one scheduler for distributed LLM inference, live and simulated."""

__version__ = "0.1.0"
