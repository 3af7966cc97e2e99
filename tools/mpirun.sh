#!/usr/bin/env bash
# mpirun.sh RANKS PROGRAM [ARG...]: starts ranks on this host, also more than it has cores.
set -eu
ranks=$1
shift
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
exec mpirun --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 -n "$ranks" "$@"
