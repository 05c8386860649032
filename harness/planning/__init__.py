"""A matrix file -> the cells of a plan, and the prompts that they send."""
