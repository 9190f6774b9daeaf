"""FOSI, DHO2 and MR-DHO2."""
