"""The command line: what can be asked, and what each command does."""
