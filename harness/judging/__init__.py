"""Observations -> verdicts; pure."""
