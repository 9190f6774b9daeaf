"""Experiments of the papers, a module for each paper; see reproduce.py."""

from experiments import dho2, distributed_kfac, dp_kfac, kaisa

EXPERIMENTS = {
    **distributed_kfac.EXPERIMENTS,
    **kaisa.EXPERIMENTS,
    **dp_kfac.EXPERIMENTS,
    **dho2.EXPERIMENTS,
}
