"""Files that people already have -> records: traces, load dumps, wait matrices, exports."""
