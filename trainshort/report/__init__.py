"""Write a report from stored results. The input is JSON. The output is HTML, Markdown and figures.

The report computes no results of its own, and this package does not import torch.

- `headline`, `tables`, `sections`, `speed` and `summary` build the parts of the report.
- `render` turns the parts into HTML and Markdown. `plotly_figures` describes the figures of the HTML page.
- `write` writes the folder of the report.
"""
