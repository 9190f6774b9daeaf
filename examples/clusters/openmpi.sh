#!/bin/bash
# bash examples/clusters/openmpi.sh DIRECTORY EPOCHS
# For several hosts: mpirun --host host0,host1, started on the first.
export KERAS_DISTRIBUTION_JOB_ADDRESSES="$(hostname):23456"
exec mpirun -n 2 -x KERAS_DISTRIBUTION_JOB_ADDRESSES \
  python examples/clusters/train.py "$@"
