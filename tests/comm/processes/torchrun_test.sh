#!/usr/bin/env bash
# torchrun_test.sh TORCHRUN RANKS COMMAND...: runs COMMAND as ranks started by torchrun. Exit status 77
# without a working one: Debian 13's requires libuv, which its PyTorch is built without.
set -u
torchrun=$1 ranks=$2
shift 2
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT
command -v "$torchrun" > /dev/null || { echo "skipped: no torchrun here"; exit 77; }
# PyTorch 1.13's torchrun, under Python 3.11, fails without --redirects and --tee.
run() {  # RANKS COMMAND...
  "$torchrun" --no_python --nproc_per_node "$1" --master_port $((20000 + $$ % 20000)) --redirects 1 --tee 1 \
    --log_dir "$log" "${@:2}"
}
said=$(run 1 true 2>&1) || { echo "skipped: this torchrun does not even start true: ${said##*$'\n'}"; exit 77; }
run "$ranks" "$@"
