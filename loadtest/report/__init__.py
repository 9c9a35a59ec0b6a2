"""`quire report`: one HTML page, readable without a network, from any set of benchmark result files.

options -> load (files to runs, through fields and parse) -> charts and comparison (runs to figures and tables) -> page.
This file imports nothing, so that the command line can have the options without plotly.
"""
