"""Experiments by name: functions that return a `RunConfig`. No torch here.

@recipes.register("my-experiment")
def my_experiment() -> RunConfig:
    \"\"\"One line that `trainshort list recipes` shows.\"\"\"
    return RunConfig(...)
"""

from collections.abc import Callable

from trainshort.config import RunConfig
from trainshort.registry import Registry

recipes: Registry[Callable[[], RunConfig]] = Registry("recipe")

from trainshort.recipes import catalog, demo  # noqa: E402, F401  (fills the registry)
