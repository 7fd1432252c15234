"""One page from stored results: JSON in, HTML, Markdown and pictures out. No torch, and nothing is computed anew.

Reading order: headline, tables, sections, speed and story (what is shown), page (HTML and Markdown), writing (all of
it), readme (the parts of README.md that are numbers).
"""
