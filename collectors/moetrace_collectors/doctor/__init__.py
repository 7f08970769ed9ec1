"""The go-live checklist: what must be known of a run before it is relied on."""
