#!/usr/bin/env bash
# bench_mpi_test.sh MPIRUN TANDEM: on processes, an uncompressed collective is timed next to MPI's, and both
# must be correct (bench fails otherwise). Odd sizes, and sizes that split evenly.
set -eu
mpirun=$1 tandem=$2
check() {  # OP DTYPE M BASELINE ARG...
  local text
  text=$("$mpirun" 3 "$tandem" bench "$1" --m "$3" --n 5 --dtype "$2" --repeats 2 --json - "${@:5}")
  grep -qF "\"baseline\": \"$4" <<<"$text" || {
    echo "bench $1 --m $3 --dtype $2: expected baseline $4 in"
    echo "$text"
    exit 1
  }
}
check all_reduce f32 37 MPI_Allreduce\"
check all_reduce bf16 37 'MPI_Allreduce with a bf16 sum of its own"'
check all_gather f32 37 MPI_Allgatherv\"
check all_gather bf16 36 MPI_Allgather\"
check reduce_scatter f32 37 MPI_Reduce_scatter\"
check reduce_scatter bf16 36 'MPI_Reduce_scatter_block with'
check all_to_all f32 37 MPI_Alltoallv\"
check all_to_all bf16 36 MPI_Alltoall\"
check broadcast f32 37 MPI_Bcast\"
check all_reduce f32 37 'direct puts' --no-library
