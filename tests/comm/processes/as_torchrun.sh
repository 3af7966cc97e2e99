#!/usr/bin/env bash
# as_torchrun.sh PROGRAM [ARG...]: on a host of netns_run.sh, which starts its ranks by mpirun: PROGRAM with
# torchrun's variables for hosts of one rank each, and without MPI's.
set -eu
export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_RANK=0 LOCAL_WORLD_SIZE=1
export MASTER_ADDR=10.77.0.1 MASTER_PORT=29500
for name in $(compgen -e | grep -E '^(OMPI|PMIX|PMI|PRTE)_'); do unset "$name"; done
exec "$@"
