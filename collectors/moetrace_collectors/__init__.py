"""The joiner service, offline tools and the command line. Never imports moetrace or torch."""
