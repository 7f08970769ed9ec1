"""What is kept of a step, and how intervals become phase rows."""
