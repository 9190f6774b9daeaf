"""Experiments of the papers; see reproduce.py."""

from experiments import dho2, kaisa, kfac_papers

EXPERIMENTS = kfac_papers.EXPERIMENTS | kaisa.EXPERIMENTS | dho2.EXPERIMENTS
