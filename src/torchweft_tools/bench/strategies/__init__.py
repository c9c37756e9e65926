"""The strategies bench."""
