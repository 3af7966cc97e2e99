#!/usr/bin/env bash
# torchrun_test.sh TORCHRUN RANKS COMMAND...: COMMAND as ranks that torchrun itself starts. Exit status 77
# where there is none that works.
set -u
torchrun=$1 ranks=$2
shift 2
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT
command -v "$torchrun" > /dev/null || { echo "skipped: no torchrun here"; exit 77; }
# PyTorch 1.13's, under Python 3.11, fails without --redirects and --tee.
"$torchrun" --no_python --nproc_per_node "$ranks" --master_port $((20000 + $$ % 20000)) --redirects 1 --tee 1 \
  --log_dir "$log" "$@"
