"""Processes of a distributed job: rendezvous, failures and common stop."""
