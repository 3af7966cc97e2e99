#!/usr/bin/env bash
# gradient_overlap_test.sh TANDEM CONFIGS: on CPU ranks buckets of gradients leave during the backward pass, with tensor
# parallelism and with experts, too, and give the bits of one bucket that leaves after it.
set -eu
tandem=$1 configs=$2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TANDEM_THREADS=1 TANDEM_CACHE_DIR=$dir/cache TANDEM_TUNE=0
fail() { echo "$1" >&2; exit 1; }

# Without clipping the norm of all gradients, whose sum depends on the buckets, changes no weights.
run() { # BUCKET_MIB ARG...
  local bucket=$1
  shift
  timeout 60 "$tandem" train "$@" --out "$dir/$bucket" --set train.steps=3 train.dtype=f32 train.seq=32 \
    optimizer.grad_clip=0 parallel.dp_bucket_mib="$bucket" trace.enabled=true trace.steps=1 > "$dir/log" 2>&1 ||
    fail "$*: $(cat "$dir/log")"
}
# sent BUCKET_MIB: for each rank of the trace, the buckets sent before the backward pass of the first layer's attention.
sent() {
  python3 -B - "$dir/$1/trace.json" <<'END_OF_SCRIPT'
import json
import sys
spans = [e for e in json.load(open(sys.argv[1]))["traceEvents"] if e.get("ph") == "X"]
def begins(rank, name):
    return [e["ts"] for e in spans if e["pid"] == rank and e["name"] == name]
for rank in sorted({e["pid"] for e in spans}):
    last = max(begins(rank, "attention_backward"))
    print(sum(begin < last for begin in begins(rank, "send_gradients")), end=" ")
END_OF_SCRIPT
}
for layout in 'tiny.toml --dp 2' 'tiny.toml --tp 2 --dp 2' 'moe.toml --dp 2 --ep 2' 'moe.toml --tp 2 --dp 2 --ep 2'; do
  # shellcheck disable=SC2086  # words
  set -- $layout
  config=$configs/$1
  shift
  run 0.02 "$config" "$@"
  run 1024 "$config" "$@"
  found=$(sent 0.02)
  case " $found" in
    "  "* | " " | *" 0 "*) fail "$layout: buckets sent before the last attention, by rank: $found" ;;
  esac
  whole=$(sent 1024)
  [ -z "$(echo "$whole" | tr -d '0 ')" ] || fail "$layout: one bucket left before its gradients: $whole"
  cmp "$dir/0.02/final/model.safetensors" "$dir/1024/final/model.safetensors" || fail "$layout: other bits"
  rm -rf "$dir/0.02" "$dir/1024"
done
