// All-gather + GEMM as one call, over an emulated link so that one machine shows the effect of
// overlap: the GEMM of a tile starts when its rows have arrived.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <vector>

#include "tandem/tandem.h"

using namespace tandem;

int main() {
  constexpr int64_t kM = 512, kN = 512, kK = 512;
  bool correct = true;
  WorldOptions options;
  options.ranks = 2;
  options.link = EmulatedLink::parse("500MB/s,50us");

  run_threads(options, [&](Communicator& comm) {
    const Shard local = shard_of(kM, comm.size(), comm.rank());
    Memory memory(size_t(local.count * kK + kN * kK + 2 * kM * kN) * sizeof(float));
    const Tensor x = memory.view(DType::f32, {local.count, kK});
    const Tensor weight = memory.view(DType::f32, {kN, kK}, x.bytes());
    for (int64_t i = 0; i < x.elements(); ++i) {
      x.as<float>()[i] = normal(1, 0, uint64_t(local.begin * kK + i));
    }
    for (int64_t i = 0; i < weight.elements(); ++i) {
      weight.as<float>()[i] = normal(1, 1 + uint64_t(comm.rank()), uint64_t(i));
    }
    Tensor out[2];
    for (const Strategy strategy : {Strategy::serial, Strategy::overlapped}) {
      const size_t at = strategy == Strategy::serial ? 0 : 1;
      out[at] = memory.view(DType::f32, {kM, kN}, x.bytes() + weight.bytes() + at * kM * kN * 4);
      AgGemm op(comm, {.m = kM, .n = kN, .k = kK}, {.strategy = strategy});
      op.run(x, weight, out[at]);  // warm up
      comm.barrier();
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < 5; ++i) op.run(x, weight, out[at]);
      const std::chrono::duration<double, std::milli> took =
          (std::chrono::steady_clock::now() - start) / 5;
      if (comm.rank() == 0) {
        std::printf("%-10s %6.2f ms   (%s link)\n", std::string(name_of(strategy)).c_str(),
                    took.count(), comm.link().c_str());
      }
    }
    for (int64_t i = 0; i < kM * kN; ++i) {
      const float a = out[0].as<float>()[i], b = out[1].as<float>()[i];
      if (!(std::abs(a - b) <= 1e-3f)) correct = false;
    }
  });
  std::printf("same result: %s\n", correct ? "yes" : "no");
  return correct ? 0 : 1;
}
