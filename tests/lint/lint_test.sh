#!/usr/bin/env bash
# The lint finds each kind of defect at its location, and nothing in a clean tree.
set -u
lint=$(cd "$(dirname "$0")/../../tools" && pwd)/lint.sh
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cp "$(dirname "$lint")/../.clang-format" "$dir"
failures=0

# file PATH: writes standard input to that file of the sample.
file() {
  mkdir -p "$dir/$(dirname "$1")"
  cat >"$dir/$1"
}
expect() {
  if ! grep -qF -- "$1" <<<"$found"; then
    printf 'expected: %s\nfound:\n%s\n' "$1" "$found" >&2
    failures=$((failures + 1))
  fi
}

file src/core/good.h <<'END'
// A clean header; a comment may say f(x) = y; so long as it reads as a sentence.
#pragma once

#include <vector>

#include "core/other.h"
#include "tandem/tensor.h"
END
file src/engine/train/good.cc <<'END'
#include "collectives/x.h"
#include "engine/model/y.h"
#include "engine/report/z.h"
#include "observe/recorder.h"
#include "tandem/overlap.h"
END
file src/overlap/gather/good.cc <<'END'
#include "overlap/contract/operator.h"
END
file src/overlap/new_operator/good.cc <<'END'
#include "overlap/contract/operator.h"
#include "overlap/gather/x.h"
#include "tandem/overlap.h"
END
file src/overlap/moe/good.cc <<'END'
#include "overlap/ag_gemm/x.h"
#include "overlap/contract/operator.h"
#include "tandem/moe.h"
END
file src/overlap/registry.cc <<'END'
#include "overlap/ag_gemm/x.h"
#include "overlap/moe/cpu/layer.h"
#include "overlap/new_operator/x.h"
END
file src/kernels/cuda/good.cu <<'END'
#include "core/cuda/load_module.cuh"
END
file include/tandem/good.h <<'END'
#pragma once

#include <cstdint>

#include "tandem/tensor.h"
END
if ! found=$("$lint" "$dir" 2>&1); then
  printf 'a clean tree has findings:\n%s\n' "$found" >&2
  failures=$((failures + 1))
fi

file src/core/up.cc <<'END'
#include "comm/world.h"
#include "tandem/communicator.h"
END
file src/kernels/up.cc <<'END'
#include "tandem/overlap.h"
END
file src/observe/up.cc <<'END'
#include "engine/model/config.h"
END
file src/overlap/ag_gemm/up.cc <<'END'
#include "overlap/contract/operator.h"
#include "overlap/registry.h"
#include "overlap/moe/cpu/layer.h"
#include "overlap/gemm_rs/x.h"
END
file src/overlap/contract/up.cc <<'END'
#include "overlap/gather/x.h"
#include "overlap/new_operator/x.h"
END
file src/overlap/gather/up.cc <<'END'
#include "overlap/gemm_rs/x.h"
#include "overlap/collectives/x.h"
END
file src/engine/data/up.cc <<'END'
#include "engine/config/config.h"
#include "engine/optim/adamw.h"
#include "engine/parallel/sharded/buckets.h"
END
file src/engine/report/up.cc <<'END'
#include "comm/base.h"
END
file src/overlap/loose.cc <<'END'
#include "core/good.h"
END
file src/misc/lost.cc <<'END'
#include "core/good.h"
END
file include/tandem/bad.h <<'END'
#include <fmt/format.h>

#include "core/system/env.h"
END
file include/tandem/quantize.h <<'END'
#pragma once

#include "tandem/overlap.h"
END
todo=TO
file src/core/body.cc <<END
int f(int x) {
  // ${todo}DO later
  // return x + 1;
  switch (x) {
    default:
      exit(1);
  }
  const char* home = "/ho""me/someone/data";
}
END
sed -i 's/""//' "$dir/src/core/body.cc"
echo '#include "core/good.h"' | file src/kernels/cuda/unloaded.cu
file src/core/copies.cc <<'END'
void f(void* to, void* from) {
  cudaMemcpy(to, from, 8, cudaMemcpyDefault);
  cudaMemset(to, 0, 8);



  cudaMemcpy2D(to, 8, from, 8, 8, 1, cudaMemcpyDefault);
  cudaMemcpyAsync(to, from, 8, cudaMemcpyDefault, nullptr);
  cudaDeviceSynchronize();
}
END
file src/core/words.cc <<'END'
// Which rows are sent.
int way_of(int rows);  // Of the rows before.
// Sends rows:
// What is sent travels in order.
int sent(int at_most);
const char* name = "refused_choices";
const char* english = "the way there, mine";
bool or_plain(int kMostRows);
TEST(Ranks, GoTheirOwnWay) {}
struct KernelJob;
int own_rows(bool in_place);
void reduce(bool in_place);
/// The same without rows.
int rows = 0;  ///< those of the shard
// As Stage's.
int from = 0;  // as in a run, the same rows
END
file src/engine/data/words.cc <<'END'
Parts own_rows(bool in_place);
int saved_rows(bool in_place);
END
file src/engine/data/devices.cc <<'END'
void f(std::span<const float> values);
std::span<double> values_of(std::span<float> all);
void g() { set_kernel_threads(1); }
END
file src/gemm/threads.cc <<'END'
void set_kernel_threads(int threads);
void g(std::span<float> values);
END
for i in $(seq 9); do echo "bool f$i = exec.on_gpu();"; done | file src/engine/data/branches.cc
printf 'int  g( );' | file src/core/style.cc
for i in $(seq 501); do echo "// line $i"; done | file src/core/long.cc
for i in $(seq 41); do echo "void f$i(const TrainConfig& config);"; done | file src/engine/train/whole.cc

if found=$("$lint" "$dir" 2>&1); then
  echo "a bad tree passes" >&2
  failures=$((failures + 1))
fi
expect 'src/core/up.cc:1: layer core includes "comm/world.h" of comm'
expect 'src/core/up.cc:2: layer core includes "tandem/communicator.h" of comm'
expect 'src/kernels/up.cc:1: layer kernels includes "tandem/overlap.h" of overlap/contract'
expect 'src/observe/up.cc:1: layer observe includes "engine/model/config.h" of engine/model'
expect 'src/overlap/ag_gemm/up.cc:2: layer overlap/operators includes "overlap/registry.h" of overlap/registry'
expect 'src/overlap/ag_gemm/up.cc:3: layer overlap/operators includes "overlap/moe/cpu/layer.h" of overlap/moe'
expect 'src/overlap/ag_gemm/up.cc:4: overlap/ag_gemm includes "overlap/gemm_rs/x.h" of overlap/gemm_rs'
expect 'src/overlap/contract/up.cc:1: layer overlap/contract includes "overlap/gather/x.h" of overlap/gather'
expect 'src/overlap/contract/up.cc:2: layer overlap/contract includes "overlap/new_operator/x.h" of overlap/operators'
expect 'src/overlap/gather/up.cc:1: layer overlap/gather includes "overlap/gemm_rs/x.h" of overlap/operators'
expect 'src/overlap/gather/up.cc:2: layer overlap/gather includes "overlap/collectives/x.h" of overlap/collectives'
expect 'src/engine/data/up.cc:2: layer engine/data includes "engine/optim/adamw.h" of engine/optim'
expect 'src/engine/data/up.cc:3: layer engine/data includes "engine/parallel/sharded/buckets.h" of engine/parallel'
if grep -q 'data/up.cc:1:' <<<"$found"; then
  echo "an include of a lower layer is found" >&2
  failures=$((failures + 1))
fi
expect 'src/engine/report/up.cc:1: layer engine/report includes "comm/base.h" of comm'
expect 'src/overlap/loose.cc:1: loose file'
expect 'src/misc/lost.cc:1: src/misc is not a layer'
expect 'include/tandem/bad.h:1: header without #pragma once'
expect 'include/tandem/bad.h:1: public header includes <fmt/format.h>'
expect 'include/tandem/bad.h:3: public header includes "core/system/env.h"'
expect 'include/tandem/quantize.h:3: public header of codec includes "tandem/overlap.h" of overlap/contract'
expect 'src/core/body.cc:2: unfinished'
expect 'src/core/body.cc:3: code in a comment'
expect 'src/core/body.cc:5: default: in a switch'
expect 'src/core/body.cc:6: library code ends the process'
expect 'src/core/body.cc:8: path of one machine'
expect 'src/kernels/cuda/unloaded.cu:1: kernels that nothing loads before their first launch'
expect 'src/core/copies.cc:2: copy that no stream orders'
expect 'src/core/copies.cc:3: copy that no stream orders'
if grep -q 'copies.cc:[78]' <<<"$found"; then
  echo "a copy beside a synchronize is found" >&2
  failures=$((failures + 1))
fi
expect 'src/engine/data/devices.cc:1: span of floats'
expect 'src/engine/data/devices.cc:2: span of floats'
expect 'src/engine/data/devices.cc:3: set_kernel_threads'
expect 'src/engine: 9 times on_gpu(): at most 8'
if grep -q 'gemm/threads.cc' <<<"$found"; then
  echo "threads of kernels are found where they are set" >&2
  failures=$((failures + 1))
fi
expect "src/core/words.cc:1: comment begins with 'Which'"
expect "src/core/words.cc:2: comment begins with 'Of'"
expect "src/core/words.cc:2: way_of: write candidate, algorithm for 'way'"
expect 'src/core/words.cc:6: refused_choices: write dropped_routings'
expect 'src/core/words.cc:8: or_plain: write allow_uncompressed'
expect "src/core/words.cc:8: kMostRows: write max for 'most'"
expect "src/core/words.cc:10: KernelJob: write params, args for 'job'"
expect "src/core/words.cc:11: own_rows: write local for 'own'"
for line in 13:The 14:those 15:As; do
  expect "src/core/words.cc:${line%:*}: comment begins with '${line#*:}'"
done
expect "src/engine/data/words.cc:1: Parts: write shards, partials, slices for 'parts'"
expect "src/engine/data/words.cc:1: own_rows: write local for 'own'"
if grep -q 'core/words.cc:\([34579]\|12\|16\):\|data/words.cc:2' <<<"$found"; then
  echo "words that are fine are found" >&2
  failures=$((failures + 1))
fi
expect 'src/core/style.cc:1: no newline at the end'
expect 'src/core/long.cc:501: 501 lines: at most 500'
expect 'src: 41 times const TrainConfig&: at most 40'
if command -v clang-format >/dev/null; then expect 'src/core/style.cc:1:'; fi

# Functions that only tests call.
file src/core/calls.h <<'END'
int called(int rows);
std::vector<int> in_tests(const int* rows,
                          int count);
struct Calls {
  bool is_empty() const { return true; }
  int size() const;  // is_empty()
};
const Calls calls_of_this_file(nullptr);
END
file src/core/calls.cc <<'END'
int called(int rows) { return rows; }
std::vector<int> in_tests(const int* rows, int count) { return {}; }
int Calls::size() const {
  const bool both = rows > 0 && called(1);
  return Calls().size();
}
END
echo 'bool tested = in_tests(nullptr, 0).empty() && Calls().is_empty();' | file tests/calls.cc
if found=$(cd "$dir" && ls src/core/calls.* tests/calls.cc | python3 "${lint%/*}/unused.py"); then
  echo "functions that only tests call are not found" >&2
  failures=$((failures + 1))
fi
expect 'src/core/calls.h:2: in_tests: no caller but tests'
expect 'src/core/calls.h:5: is_empty: no caller but tests'
if grep -qE 'called|size|calls_of' <<<"$found"; then
  printf 'functions with a caller are found:\n%s\n' "$found" >&2
  failures=$((failures + 1))
fi
[ "$failures" = 0 ]
