"""Code shared by the tools: data, models, command line, tables."""
