"""Imported by every Python process of an engine, before anything else; this folder is on their PYTHONPATH alone.

Importing vLLM and torch makes millions of objects that live for ever. With Python's default thresholds the garbage
collector walks them again and again, which takes about a fifth of an engine's start, twice per engine.
"""

import gc

gc.set_threshold(100_000, 50, 50)
