"""Serving a compiled model: its session, its plans by context, gate, report and trials."""
