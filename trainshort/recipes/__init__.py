"""Settings of whole runs by name: functions that return a `RunConfig`. No torch here.

@recipes.register("my-recipe")
def my_recipe() -> RunConfig:
    \"\"\"One line that `trainshort list recipes` shows.\"\"\"
    return RunConfig(...)

Reading order: scales (which text, which model, how long), experiments (what a table needs), paper (its
tables and figures), catalog (a recipe for each of their models).
"""

from collections.abc import Callable

from trainshort.config import RunConfig
from trainshort.registry import Registry

recipes: Registry[Callable[[], RunConfig]] = Registry("recipe")

from trainshort.recipes import catalog  # noqa: E402, F401  (fills the registry)
