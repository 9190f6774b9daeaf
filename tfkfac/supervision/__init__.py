"""Duties of an optimizer around `fit`, alone and among workers."""
