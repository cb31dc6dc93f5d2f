"""Doors for those who have an engine already."""
