#!/usr/bin/env bash
# gpu_timeline.sh BIN OUT: records one AG+GEMM and one GEMM+RS on this machine's GPUs, and draws
# them. BIN is from a build with -DTANDEM_DEVICE_TIMELINE=ALL.
set -u
bin=$1 out=$2
mkdir -p "$out"
export NCCL_NVLS_ENABLE=0 TANDEM_DEADLINE_S=${TANDEM_DEADLINE_S:-30} TANDEM_LOG=${TANDEM_LOG:-info}
# CUDA libraries installed by Python wheels instead of a toolkit.
wheels=$(python3 -c 'import glob, nvidia
print(":".join(d for p in nvidia.__path__ for d in glob.glob(p + "/*/lib")))' 2>/dev/null || true)
export LD_LIBRARY_PATH=$bin/lib:$wheels:${LD_LIBRARY_PATH:-}
gpus=$(nvidia-smi -L | wc -l)
draw() {
  local op=$1 shape=$2 title=$3
  timeout "${GPU_BENCH_SECONDS:-60}" "$bin/tandem" bench "$op" --transport nccl --ranks "$gpus" \
    --dtype bf16 --repeats 5 --shapes "$shape" --timeline "$out/$op.json" &&
    "$bin/tandem" trace "$out/$op.json" --title "$title, ${shape//x/ × }, bf16, $gpus GPUs" &&
    gzip -kf "$out/$op.json" || echo "$op: failed"
}
draw ag_gemm "${AG_SHAPE:-4096x57344x8192}" "AG+GEMM" 2>&1 | tee "$out/timeline.log"
draw gemm_rs "${RS_SHAPE:-4096x8192x28672}" "GEMM+RS" 2>&1 | tee -a "$out/timeline.log"
ls -l "$out"
! grep -q ': failed$' "$out/timeline.log"
