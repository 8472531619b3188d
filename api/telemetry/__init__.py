"""Telemetry of the server: log, metrics and traces; nothing here decides anything."""
