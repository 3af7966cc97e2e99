// Cost of the operators at world size 1, compared with a bare oneDNN matmul of the same shape and
// threads. Each pair runs `bare` and the operator on the same data; items per second are FLOP/s.
#include <benchmark/benchmark.h>

#include <memory>
#include <unordered_map>

#include "gemm/cpu/onednn.h"
#include "gemm/gemm.h"
#include "run_benchmarks.h"
#include "tandem/overlap.h"
#include "tandem/random.h"

namespace {

using namespace tandem;

struct Operands {
  DType dtype;
  int64_t m, n, k;
  Memory x, weight, out;
  explicit Operands(const benchmark::State& state)
      : dtype(state.range(3) ? DType::bf16 : DType::f32),
        m(state.range(0)),
        n(state.range(1)),
        k(state.range(2)),
        x(size_t(m * k) * size_of(dtype)),
        weight(size_t(n * k) * size_of(dtype)),
        out(size_t(m * n) * size_of(dtype)) {
    for (const Memory* buffer : {&x, &weight}) {
      for (size_t i = 0; i < buffer->bytes() / size_of(dtype); ++i) {
        const float value = uniform(1, 0, i) - 0.5f;
        if (dtype == DType::f32) {
          reinterpret_cast<float*>(buffer->data())[i] = value;
        } else {
          reinterpret_cast<BFloat16*>(buffer->data())[i] = BFloat16::from_float(value);
        }
      }
    }
  }
  Tensor x_view() const { return x.view(dtype, {m, k}); }
  Tensor weight_view() const { return weight.view(dtype, {n, k}); }
  Tensor out_view() const { return out.view(dtype, {m, n}); }
};

void report(benchmark::State& state, const Operands& o) {
  state.SetItemsProcessed(state.iterations() * 2 * o.m * o.n * o.k);
}

void bare(benchmark::State& state) {
  const Operands o(state);
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  const auto type =
      o.dtype == DType::f32 ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::bf16;
  const dnnl::memory::desc a({o.m, o.k}, type, {o.k, 1}), b({o.k, o.n}, type, {1, o.k});
  const dnnl::memory::desc c({o.m, o.n}, type, {o.n, 1});
  const dnnl::matmul matmul(cpu::matmul_plan(engine, a, b, nullptr, c, {}));
  const std::unordered_map<int, dnnl::memory> arguments{
      {DNNL_ARG_SRC, dnnl::memory(a, engine, o.x.data())},
      {DNNL_ARG_WEIGHTS, dnnl::memory(b, engine, o.weight.data())},
      {DNNL_ARG_DST, dnnl::memory(c, engine, o.out.data())}};
  for (auto _ : state) {
    matmul.execute(stream, arguments);
    stream.wait();
  }
  report(state, o);
}

template <typename Operator>
void operators(benchmark::State& state) {
  const Operands o(state);
  run_threads({}, [&](Communicator& comm) {
    const KernelThreads threads(1);
    Operator op(comm, {o.m, o.n, o.k, o.dtype});
    for (auto _ : state) op.run(o.x_view(), o.weight_view(), o.out_view());
  });
  report(state, o);
}

void shapes(benchmark::internal::Benchmark* b) {
  for (const int64_t bf16 : {0, 1}) {
    for (const int64_t m : {32, 128, 512}) b->Args({m, 1024, 1024, bf16});
    b->Args({256, 688, 256, bf16})->Args({64, 256, 256, bf16});
  }
  b->ArgNames({"m", "n", "k", "bf16"})->UseRealTime();
}

BENCHMARK(bare)->Apply(shapes);
BENCHMARK(operators<AgGemm>)->Name("ag_gemm")->Apply(shapes);
BENCHMARK(operators<GemmRs>)->Name("gemm_rs")->Apply(shapes);
BENCHMARK(operators<GemmAr>)->Name("gemm_ar")->Apply(shapes);

}  // namespace

int main(int argc, char** argv) {
  return tandem::run_benchmarks(argc, argv);
}
