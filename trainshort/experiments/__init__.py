"""The experiments of the ALiBi paper: recipes, tables, claims, and the code that runs them."""
