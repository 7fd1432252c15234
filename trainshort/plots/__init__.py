"""Figures, wherever one is drawn: plain data first (figures), then files (pictures) or a page's script (plotly).

No torch. A position method has one colour in all of them.
"""
