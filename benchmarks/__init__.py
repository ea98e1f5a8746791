"""Measurements, not tests: each module prints a table and, with --json, writes it."""
