"""The experiments of the ALiBi paper: recipes, tables, claims, and the commands that repeat them."""
