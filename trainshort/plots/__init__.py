"""Figures, wherever one is drawn: plain data and files (figures), a page's script (plotly).

No torch. A position method has one colour in all of them.
"""
