"""Metrics, spans and log lines, derived from events and records; nothing here is read by a decision."""
