"""The paper as a command: what is missing is computed, what is there is kept.

Reading order: tasks (what to do, what is done, and all of it to its end, with progress), launchers (where several run),
extras (costs, and the demo's texts), plan (what it would take). recipes/experiments says what a table needs.
"""
