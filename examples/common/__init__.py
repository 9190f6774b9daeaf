"""Code shared by the examples: data, models, command line, result table.

Using tfkfac needs none of this code: see quickstart.py.
"""
