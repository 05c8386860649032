"""Writes the pages of docs/ that come from the code; `make docs` calls it."""

from harness.reference import pages

for path, text in pages().items():
    path.write_text(text)
    print(path)
