"""One module per command of the `moetrace` command line."""
