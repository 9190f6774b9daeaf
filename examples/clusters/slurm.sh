#!/bin/bash
#SBATCH --ntasks=2
#SBATCH --time=01:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# sbatch examples/clusters/slurm.sh DIRECTORY EPOCHS
# Two minutes before its time is over, the job backs up and is queued again.
srun python examples/clusters/train.py "$@"
code=$?
if [[ $code == 143 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
