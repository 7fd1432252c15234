"""One page from stored results: JSON in, HTML, Markdown and pictures out. No torch, and nothing is computed anew.

Reading order: figures (what a figure is), headline and sections (what is shown), sources (where a number comes from),
page (HTML), pictures (PNG and SVG), build (all of it).
"""
