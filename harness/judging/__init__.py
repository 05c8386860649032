"""Observations -> verdicts; pure, but for reading the file of known issues."""
