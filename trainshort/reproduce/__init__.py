"""The paper as a command: what is missing is computed, what is there is kept.

Reading order: tasks (what to do, and what is done), work (one task), here and cluster (where tasks run), runner (all of
it, with progress), plan (what it would take). recipes/experiments says what a table needs.
"""
