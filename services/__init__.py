"""What runs inside the engines: the connectors, the block store, and the program that starts vLLM."""
