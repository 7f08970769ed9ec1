"""Where rank steps come in: OTLP over HTTP and gRPC behind one handler; and the pages beside them."""
