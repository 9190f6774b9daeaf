#!/usr/bin/env bash
# Installs Slurm and Open MPI from Debian, and Ray in a new environment; starts
# Slurm on this machine. For root, on a temporary machine: it overwrites Slurm's
# configuration. tools/test.sh --clusters calls it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ray="$root/.venv-ray"

if ! command -v slurmctld munged mpirun.openmpi mpirun.mpich >/dev/null; then
  apt-get update -q
  DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends \
    slurm-wlm munge openmpi-bin mpich
fi

if ! [[ -x "$ray/bin/ray" ]]; then
  "$python" -m venv --clear "$ray"
  "$ray/bin/python" -m pip install -q --disable-pip-version-check 'ray[train]'
  # All else, TensorFlow too, comes from the environment of the tests.
  "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$ray/lib/$(ls "$ray/lib" | head -n 1)/site-packages/tests.pth"
fi

if ! sinfo --noheader >/dev/null 2>&1; then
  host="$(hostname -s)"
  install -d -o munge -g munge /run/munge
  if ! [[ -f /etc/munge/munge.key ]]; then
    install -o munge -m 400 <(head -c 1024 /dev/urandom) /etc/munge/munge.key
  fi
  pgrep -x munged >/dev/null || runuser -u munge -- munged
  mkdir -p /var/spool/slurmctld /var/spool/slurmd
  cat >/etc/slurm/slurm.conf <<END
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
END
  slurmctld
  slurmd
fi
for _ in {1..30}; do
  sinfo --noheader --format=%T | grep -Eq 'idle|mixed|allocated' && exit 0
  sleep 1
done
sinfo
exit 1
