#!/usr/bin/env bash
# gpu_check.sh BIN OUT [REPEATS]: GPU tests and benchmark cases of docs/results/performance.md on this
# machine, with programs built elsewhere with the same libraries. Logs and JSON are written to OUT.
# With GPU_PEERS=1 runs PyTorch on the same cases after each operator (bench/peers), and cuBLASMp if
# CUBLASMP_LIB names the folders of its libraries and of its NCCL and BIN has peer_cublasmp.
# GPU_OPS=moe GPU_SHARED=1 GPU_MOE_RANKS=4: a dry run of the MoE layers, with ranks that share one GPU.
# GPU_MOE_CODECS="int8 int4:g32": these layers also over each wire format, in dispatch and combine.
# GPU_OPS=emulated_moe: MoE layers between four ranks of one GPU, on emulated links on which their rows and sums
# take about as long as their GEMMs (GPU_EMULATED_MOE="MODEL@LINK …"), for `emulated_moe` of tools/tables.py.
# GPU_CODECS names wire formats ("int8 int6 int4 lossless"): the collectives over each of them next to NCCL
# and the uncompressed ones, GPU_CODEC_BYTES large, into OUT/codecs (tools/codec_runs.py), and their tests
# with 10,000 calls. GPU_OPERATOR_CODECS names those of GEMM+RS and AG+GEMM, next to the uncompressed ones and
# only the GEMM, into OUT/operator-codecs. GPU_RANKS_PER_GPU=4 lets four ranks share each GPU, to check that all of it runs.
set -u
bin=$1 out=$2 repeats=${3:-30}
peers=$(cd "$(dirname "$0")/../bench/peers" 2>/dev/null && pwd)
mkdir -p "$out"
export NCCL_NVLS_ENABLE=0 TANDEM_DEADLINE_S=${TANDEM_DEADLINE_S:-30}
# CUDA libraries installed by Python wheels instead of a toolkit.
wheels=$(python3 -c 'import glob, nvidia
print(":".join(d for p in nvidia.__path__ for d in glob.glob(p + "/*/lib")))' 2>/dev/null || true)
export LD_LIBRARY_PATH=$bin/lib:$wheels:${LD_LIBRARY_PATH:-}
gpus=$(nvidia-smi -L | wc -l)
world=(--ranks "$gpus")
[ -z "${GPU_RANKS_PER_GPU:-}" ] || world=(--ranks-per-gpu "$GPU_RANKS_PER_GPU")
failed=0
if [ "${GPU_TESTS:-1}" = 1 ]; then
  timeout "${GPU_TEST_SECONDS:-200}" "$bin/gpu_test" --gtest_brief=0 >"$out/gpu_test.log" 2>&1 || failed=1
  timeout 100 "$bin/gpu_comm_test" >"$out/gpu_comm_test.log" 2>&1 || failed=1
  timeout 100 "$bin/gpu_kernels_test" >"$out/gpu_kernels_test.log" 2>&1 || failed=1
  grep -hE "FAILED|PASSED|Failure|error" "$out/gpu_test.log" "$out/gpu_comm_test.log" "$out/gpu_kernels_test.log" | head -40
fi
export TANDEM_CACHE_DIR=${TANDEM_CACHE_DIR:-$out/cache}  # no timings from another machine
# run_bench OP NAME OPTION...: writes OUT/NAME.json.
run_bench() {
  local op=$1 name=$2
  shift 2
  timeout "${GPU_BENCH_SECONDS:-150}" "$bin/tandem" bench "$op" --transport nccl "${world[@]}" \
    --dtype bf16 --repeats "$repeats" --json "$out/$name.json" "$@" 2>&1 | tee -a "$out/bench.log"
  [ "${PIPESTATUS[0]}" = 0 ] || { failed=1; echo "$name: failed"; }
}
bench() {
  local op=$1
  shift
  run_bench "$op" "$op" --shapes "$@"
  [ "${GPU_PEERS:-0}" = 1 ] || return 0
  case $op in ag_wgrad | all_gather | reduce_scatter) return 0 ;; esac
  peers "$op" "$@"
}
peers() {
  local op=$1 rank
  shift
  mkdir -p "$out/peers"
  TORCH_SYMM_MEM_DISABLE_MULTICAST=1 CUDA_DEVICE_MAX_CONNECTIONS=32 timeout "${GPU_BENCH_SECONDS:-150}" \
    python3 -m torch.distributed.run --nproc-per-node "$gpus" "$peers/torch_tp.py" "$op" \
    "$out/peers/$op.json" "$@" 2>&1 | grep -v Warning | tee -a "$out/peers.log"
  [ -n "${CUBLASMP_LIB:-}" ] && [ "$op" != all_reduce ] || return 0
  for rank in $(seq 0 $((gpus - 1))); do
    RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$gpus MASTER_ADDR=127.0.0.1 MASTER_PORT=29611 \
      LD_LIBRARY_PATH=$CUBLASMP_LIB:$LD_LIBRARY_PATH timeout "${GPU_BENCH_SECONDS:-150}" \
      "$bin/peer_cublasmp" "$op" "$out/peers/cublasmp-$op.json" "$repeats" "$@" 2>&1 &
  done | tee -a "$out/peers.log"
}
# MoE layers in every EP x TP layout of the GPUs, each in a file moe-MODEL-epE-tpT[-…].json.
experts() {
  local model=$1 ep=$2 tp=$3 name=$4 shared=()
  shift 4
  [ "${GPU_SHARED:-0}" = 1 ] && shared=(--ranks-per-gpu $((ep * tp)))
  timeout "${GPU_BENCH_SECONDS:-150}" "$bin/tandem" bench moe --transport nccl "${shared[@]}" --model "$model" \
    --ranks $((ep * tp)) --ep "$ep" --tp "$tp" --repeats "$repeats" --json "$out/moe-$model-ep$ep-tp$tp$name.json" "$@" 2>&1 |
    tee -a "$out/bench.log"
  [ "${PIPESTATUS[0]}" = 0 ] || { failed=1; echo "moe $model $ep x $tp$name: failed"; }
}
moe() {
  local model m=${GPU_MOE_M:-64 256 1024 4096 16384 32768} ranks=${GPU_MOE_RANKS:-$gpus} uneven codec
  for model in ${GPU_MOE_MODELS:-mixtral-8x7b phi3.5-moe qwen2-moe-2.7b qwen3-30b}; do
    experts "$model" "$ranks" 1 "" --tokens $m
    experts "$model" 1 "$ranks" "" --tokens $m
    [ $((ranks % 2)) != 0 ] || [ "$ranks" = 2 ] || experts "$model" $((ranks / 2)) 2 "" --tokens $m
    experts "$model" "$ranks" 1 -backward --backward --tokens ${GPU_MOE_BACKWARD_M:-4096 16384 32768}
    for uneven in ${GPU_MOE_IMBALANCE:-2 4 zipf}; do
      [ "$uneven" = zipf ] || [ "$uneven" -le "$ranks" ] || continue
      experts "$model" "$ranks" 1 "-imbalance$uneven" --imbalance "$uneven" --tokens ${GPU_MOE_UNEVEN_M:-16384}
    done
    for codec in ${GPU_MOE_CODECS:-}; do
      experts "$model" "$ranks" 1 "-${codec//:/-}" --codec "$codec" --tokens ${GPU_MOE_CODEC_M:-1024 4096 16384 32768}
    done
  done
  [ "${GPU_PEERS:-0}" != 1 ] || moe_peers
  python3 "$(dirname "$0")/moe_gpus_table.py" "$(realpath "$out")" >"$out/moe.md" || failed=1
}
emulated_moe() {
  local case model link codec uneven GPU_SHARED=1
  for case in ${GPU_EMULATED_MOE:-qwen2-moe-2.7b@33GB/s,5us qwen3-30b@40GB/s,5us phi3.5-moe@10GB/s,5us mixtral-8x7b@4.5GB/s,5us}; do
    model=${case%@*} link=${case#*@}
    for codec in none ${GPU_MOE_CODECS-int8}; do
      for uneven in ${GPU_MOE_IMBALANCE:-1 2 4}; do
        experts "$model" 4 1 "-${link//[\/,]/-}-${codec//:/-}-imbalance$uneven" --link "$link" --codec "$codec" \
          --imbalance "$uneven" --tokens ${GPU_EMULATED_M:-4096 16384}
      done
    done
  done
}
moe_peers() {
  local model m cases=()
  for model in ${GPU_MOE_MODELS:-mixtral-8x7b phi3.5-moe qwen2-moe-2.7b qwen3-30b}; do
    for m in ${GPU_MOE_PEER_M:-4096 16384 32768}; do cases+=("$model:$m"); done
  done
  mkdir -p "$out/peers"
  timeout "${GPU_BENCH_SECONDS:-150}" python3 -m torch.distributed.run --nproc-per-node "$gpus" \
    "$peers/torch_moe.py" "$out/peers/moe.json" "${cases[@]}" 2>&1 | grep -v Warning | tee -a "$out/peers.log"
}
cases() {
  local sizes=$1 m
  shift
  for nk in "$@"; do for m in $sizes; do echo "${m}x$nk"; done; done
}
plain() { for bytes in "$@"; do echo "64x$((bytes / 128))x1"; done; }
for op in ${GPU_OPS-all_reduce all_gather reduce_scatter gemm_ar ag_gemm gemm_rs moe}; do
  case $op in
    all_reduce | all_gather | reduce_scatter)
      bench $op $(plain 16384 65536 262144 1048576 4194304 16777216 67108864 268435456)
      ;;
    moe) moe ;;
    emulated_moe) emulated_moe ;;
    gemm_ar) bench $op $(cases "${GPU_AR_M:-1 8 16 64 128 256}" 8192x8192 8192x28672) ;;
    ag_gemm | ag_wgrad) bench $op $(cases "${GPU_M:-64 512 1024 2048 4096 8192 16384}" 10240x8192 57344x8192 49152x12288) ;;
    gemm_rs) bench $op $(cases "${GPU_M:-64 512 1024 2048 4096 8192 16384}" 8192x8192 8192x28672 12288x49152) ;;
  esac
done
if [ -n "${GPU_CODECS:-}" ]; then
  mkdir -p "$out/codecs"
  TANDEM_STRESS_CALLS=${GPU_CODEC_CALLS:-10000} timeout "${GPU_TEST_SECONDS:-200}" "$bin/gpu_test" \
    --gtest_filter='*Encoded*:*GpuCodec*' >"$out/codec_test.log" 2>&1 || { failed=1; echo "codec tests: failed"; }
  for codec in $GPU_CODECS; do
    for op in all_reduce all_gather reduce_scatter all_to_all; do
      case $codec:$op in lossless:all_reduce | lossless:reduce_scatter) continue ;; esac  # no sums on GPUs
      run_bench $op "codecs/$op-${codec//:/-}" --codec "$codec" --shapes \
        $(plain ${GPU_CODEC_BYTES:-65536 262144 1048576 4194304 16777216 67108864 268435456})
    done
  done
fi
for codec in ${GPU_OPERATOR_CODECS:-}; do
  mkdir -p "$out/operator-codecs"
  run_bench gemm_rs "operator-codecs/gemm_rs-${codec//:/-}" --codec "$codec" --shapes 8192x8192x8192
  run_bench ag_gemm "operator-codecs/ag_gemm-${codec//:/-}" --codec "$codec" --shapes $(cases "1024 2048" 10240x8192 57344x8192)
done
exit $failed
