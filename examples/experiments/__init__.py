"""Experiments of the papers, for reproduce.py.

An experiment (`experiment`) says what varies, what is trained and what is
looked at; there is a module for each paper. `running` does the trainings, each
in processes of its own, `output` makes the table, the CSV file and the plot.
"""

from experiments import dho2, distributed_kfac, dp_kfac, kaisa

EXPERIMENTS = {
    **distributed_kfac.EXPERIMENTS,
    **kaisa.EXPERIMENTS,
    **dp_kfac.EXPERIMENTS,
    **dho2.EXPERIMENTS,
}
