// Attention of one sequence on one CPU thread, forward and backward, by sliding window (0: none).
#include <benchmark/benchmark.h>

#include "gemm/gemm.h"
#include "kernels/attention/attention.h"
#include "run_benchmarks.h"
#include "tandem/random.h"

namespace {

using namespace tandem;

constexpr int64_t kSeq = 2048, kHeads = 4, kHeadDim = 64;

struct Rows {
  explicit Rows(uint64_t stream)
      : memory(size_t(kSeq * kHeads * kHeadDim) * sizeof(float)),
        tensor(memory.view(DType::f32, {kSeq, kHeads * kHeadDim})) {
    for (int64_t i = 0; i < tensor.elements(); ++i) {
      tensor.as<float>()[i] = normal(1, stream, uint64_t(i));
    }
  }
  Memory memory;
  Tensor tensor;
};

struct Operands {
  Rows q{1}, k{2}, v{3}, dout{4}, out{5}, dq{6}, dk{7}, dv{8};
  Memory sums{size_t(kHeads * kSeq) * sizeof(float)};
  Tensor log_sums = sums.view(DType::f32, {kHeads, kSeq});
  RopeTable rope{Exec{}, kSeq, kHeadDim, 10000};
  Attention attention{Exec{}, {1, kSeq, kHeads, kHeads, kHeadDim}, rope};

  void forward(int64_t window) {
    attention.forward({}, q.tensor, k.tensor, v.tensor, out.tensor, log_sums, window);
  }
};

void forward(benchmark::State& state) {
  Operands o;
  for (auto _ : state) o.forward(state.range(0));
}

void backward(benchmark::State& state) {
  Operands o;
  const int64_t window = state.range(0);
  o.forward(window);
  for (auto _ : state) {
    o.attention.backward({}, o.q.tensor, o.k.tensor, o.v.tensor, o.out.tensor, o.log_sums,
                         o.dout.tensor, o.dq.tensor, o.dk.tensor, o.dv.tensor, window);
  }
}

void windows(benchmark::internal::Benchmark* b) {
  b->Arg(0)->Arg(1024)->Arg(256)->Arg(64)->ArgName("window")->Unit(benchmark::kMillisecond);
}
BENCHMARK(forward)->Apply(windows);
BENCHMARK(backward)->Apply(windows);

}  // namespace

int main(int argc, char** argv) {
  return tandem::run_benchmarks(argc, argv);
}
