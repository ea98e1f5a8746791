"""Metrics and logs, derived from events; nothing here is read by a decision."""
