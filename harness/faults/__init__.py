"""What is broken outside the connector: files on the volume, and processes."""
