// All-gather + GEMM on up to four GPUs of this machine, from a user program: operands are device
// memory, work is ordered by the communicator's stream, and synchronize() waits and throws.
#include <cuda_runtime_api.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

#include "tandem/tandem.h"

using namespace tandem;

namespace {

void check(cudaError_t code) {
  if (code != cudaSuccess) throw DeviceError(cudaGetErrorString(code));
}

// Row-major bf16 on the rank's GPU, filled with the random values of `stream` from index `first`.
struct Matrix {
  struct Free {
    void operator()(void* memory) const { cudaFree(memory); }
  };
  std::vector<BFloat16> host;
  std::unique_ptr<void, Free> owner;
  Tensor tensor;

  Matrix(Communicator& comm, int64_t rows, int64_t columns, uint64_t stream, int64_t first)
      : host(size_t(rows * columns)) {
    for (size_t i = 0; i < host.size(); ++i) {
      host[i] = BFloat16::from_float(normal(1, stream, uint64_t(first) + i));
    }
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes()));
    owner.reset(memory);
    tensor = Tensor(memory, DType::bf16, {rows, columns}, device_of(comm));
    check(cudaMemcpyAsync(memory, host.data(), bytes(), cudaMemcpyDefault, stream_of(comm)));
  }
  size_t bytes() const { return host.size() * sizeof(BFloat16); }
};

// Largest error of sampled elements, relative to the bound for rounding to bf16.
double worst(const Matrix& x, const Matrix& weight, const std::vector<BFloat16>& out, int64_t k) {
  double worst = 0;
  const size_t n = weight.host.size() / size_t(k);
  for (size_t at = 0; at < out.size(); at += out.size() / 97) {
    double exact = 0, size = 0;
    for (size_t i = 0; i < size_t(k); ++i) {
      const double term = double(x.host[at / n * size_t(k) + i].to_float()) *
                          double(weight.host[at % n * size_t(k) + i].to_float());
      exact += term;
      size += std::abs(term);
    }
    const double error = std::abs(double(out[at].to_float()) - exact);
    worst =
        std::fmax(worst, std::isnan(error) ? 1e9 : error / (std::abs(exact) / 256 + size / 1e5));
  }
  return worst;
}

}  // namespace

int main() try {
  const int gpus = gpu_count() < 4 ? gpu_count() : 4;
  if (gpus == 0) {
    std::puts("no GPU here, or a build without CUDA");
    return 77;
  }
  constexpr int64_t kM = 1024, kN = 512, kK = 2048;
  std::atomic<bool> correct = true;
  WorldOptions options;
  options.ranks = gpus;
  run_gpus(options, [&](Communicator& comm) {
    const Shard local = shard_of(kM, comm.size(), comm.rank());
    const Matrix x(comm, local.count, kK, 0, local.begin * kK), all(comm, kM, kK, 0, 0),
        weight(comm, kN, kK, 1 + uint64_t(comm.rank()), 0), out(comm, kM, kN, 9, 0);
    AgGemm op(comm, {.m = kM, .n = kN, .k = kK, .dtype = DType::bf16});
    op.run(x.tensor, weight.tensor, out.tensor);  // returns at once
    std::vector<BFloat16> result(out.host.size());
    synchronize(comm);  // not by a copy to the host, which would wait without a deadline
    check(cudaMemcpy(result.data(), out.tensor.data(), out.bytes(), cudaMemcpyDefault));
    const double error = worst(all, weight, result, kK);
    std::printf("rank %d of %d, %s: error %.2f of what rounding may cost\n", comm.rank(), gpus,
                std::string(name_of(op.strategy())).c_str(), error);
    if (!(error <= 1)) correct = false;
  });
  return correct ? 0 : 1;
} catch (const Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return error.exit_code();
}
