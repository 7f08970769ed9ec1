"""Steps as traces that other tools open: Chrome trace events for Perfetto, and OTLP spans."""
