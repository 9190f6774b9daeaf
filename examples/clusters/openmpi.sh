#!/bin/bash
# bash examples/clusters/openmpi.sh DIRECTORY EPOCHS
# On several hosts add --host host0,host1 and start it on the first of them.
export KERAS_DISTRIBUTION_JOB_ADDRESSES="$(hostname):23456"
exec mpirun -n 2 -x KERAS_DISTRIBUTION_JOB_ADDRESSES \
  python examples/clusters/train.py "$@"
