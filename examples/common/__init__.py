"""What the examples share: data, models, the command line and the table.

Nothing of it is needed to use tfkfac: see quickstart.py.
"""
