"""Leaving the process: drain thread and emitters."""
