#!/usr/bin/env bash
# launch.sh RANKS PROGRAM [ARG...]: ranks on this host with torchrun's variables (or srun's, if
# TANDEM_TEST_LAUNCHER is srun) but without its supervision: ranks must detect the loss of a rank themselves.
# Rank TANDEM_TEST_ABSENT never starts. The exit status is the largest of theirs.
set -u
port=${MASTER_PORT:-$((20000 + $$ % 12000))}  # another one than that of a test which runs at the same time
ranks=$1
shift
children=()
trap 'kill -KILL "${children[@]}" 2> /dev/null' EXIT
trap 'exit 130' INT TERM HUP
for ((rank = 0; rank < ranks; ++rank)); do
  [ "$rank" != "${TANDEM_TEST_ABSENT:-}" ] || continue
  variables=(RANK=$rank LOCAL_RANK=$rank WORLD_SIZE="$ranks" LOCAL_WORLD_SIZE="$ranks"
    MASTER_ADDR=127.0.0.1 MASTER_PORT=$port TORCHELASTIC_RUN_ID=$$)
  if [ "${TANDEM_TEST_LAUNCHER:-}" = srun ]; then
    variables=(SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_STEP_NUM_TASKS="$ranks"
      SLURM_STEP_NODELIST="$(hostname)" SLURM_JOB_ID=$$ SLURM_STEP_ID=0)
  fi
  env "${variables[@]}" "$@" &
  children+=($!)
done
worst=0
for child in "${children[@]}"; do
  wait "$child"
  status=$?
  [ $status -le $worst ] || worst=$status
done
exit $worst
