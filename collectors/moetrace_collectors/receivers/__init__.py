"""Where rank steps come in: OTLP over HTTP and gRPC, one handler behind both; and the HTTP pages beside them."""
