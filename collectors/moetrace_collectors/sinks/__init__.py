"""Where joined steps go: one module per destination, all behind `base.Sink`."""
