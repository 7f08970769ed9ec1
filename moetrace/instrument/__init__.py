"""Events are born: wrappers, counters, coverage."""
