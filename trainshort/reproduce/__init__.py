"""The paper as a command: what is missing is computed, what is there is kept.

Reading order: tasks (what to do, what is done, and one task to its end), launchers (where several run), runner (all of
it, with progress), plan (what it would take). recipes/experiments says what a table needs.
"""
