#include "bench/bench_rates.h"

#include "bench/bench_collective.h"
#include "bench/bench_moe.h"
#include "bench/engine/bench_prefill.h"
#include "overlap/registry.h"

namespace tandem {

double tflops(const BenchRequest& request, int ranks, double us) {
  const OpDesc whole{.m = request.m, .n = request.n, .k = request.k, .dtype = request.dtype};
  const OperatorRow* row = find_operator(request.op);
  double operations = (row ? row->flops(whole) : gemm_flops(whole)) / ranks;
  if (const BenchMoeOp* moe = find_moe(request.op)) {  // backward takes twice as much
    operations *= double(moe->gemms) * request.moe.top_k * (request.moe.backward ? 3 : 1);
  }
  if (is_prefill(request.op)) {  // four attention GEMMs, scores, weighted sums, three MLP GEMMs
    const auto m = double(request.m), k = double(request.k);
    operations = 2 * m * k * double(request.layers) * (4 * k + m + 3 * double(request.n)) / ranks;
  }
  return us > 0 ? operations / us / 1e6 : 0;
}

int64_t matrix_bytes(const BenchRequest& request) {
  return request.m * request.n * int64_t(size_of(request.dtype));
}

Bandwidth bandwidth(const BenchRequest& request, int ranks, double us) {
  if (us <= 0) return {};
  const double algbw = double(matrix_bytes(request)) / us / 1e3;
  const BenchCollective* collective = find_collective(request.op);
  const auto is = [&](NativeOp op) { return collective && collective->op == op; };
  if (is(NativeOp::broadcast)) return {algbw, ranks > 1 ? algbw : 0};
  const double others = double(ranks - 1) / ranks;
  return {algbw, algbw * (is(NativeOp::all_reduce) ? 2 * others : others)};
}

}  // namespace tandem
