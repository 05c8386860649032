"""The engines of compose.yaml, as plans see them with nothing in the environment."""

from harness.stack import COMPOSE_FILE, cell_engines, read_engines

ENGINES = cell_engines(read_engines(COMPOSE_FILE, {}))
