// gpu_encoded_rs_bench [RANKS]: cost to the GEMM of encoding and decoding tiles within a GEMM+RS.
// Runs one rank's kernels with the whole GPU, on the shapes of Llama-70B's second projections (M
// 4096, TP 4): only cuBLASLt's GEMM; GEMM+RS that sends tiles in bf16 (`fused`); the same in wire
// formats. The rank plays all ranks: it receives what it sends. Nothing crosses a link, so times
// show the cost of the kernels, not the savings. Candidates in random order with idle gaps, L2
// flushed; medians. Checked in the same run: received data, decoded and summed, against the sum of
// bf16 tiles. Prints one JSON object per line.
#include <fmt/format.h>

#include <memory>
#include <string>
#include <vector>

#include "bench/gpu_candidates.h"
#include "core/cuda/fill.h"
#include "gemm/cuda/gemm_lt.h"
#include "overlap/gemm_rs/cuda/fused.h"
#include "overlap/scatter/cuda/encoded.h"

namespace tandem {
namespace {

using namespace gpu;

constexpr int64_t kM = 4096, kN = 8192;
constexpr int kRepeats = 21;
// Signals: ready flags by rank, then chunk flags, unused by the current plans, then arrival flags.
constexpr int kArrivedTiles = 8 * kMaxGpus;

/// Staging memory shared by all ranks, and its signals, with every rank marked as ready.
struct Staging {
  DeviceMemory memory, signals, calls;
  PeerTable table;

  Staging(size_t bytes, int64_t arrived_tiles, int ranks, cudaStream_t stream)
      : memory(bytes),
        signals(size_t(kArrivedTiles + arrived_tiles) * 8),
        calls(sizeof(CallCounter)) {
    for (int r = 0; r < ranks; ++r) {
      table.memory[r] = memory.data();
      table.signals[r] = reinterpret_cast<uint64_t*>(signals.data());
    }
    table.size = ranks;
    check(cudaMemsetAsync(signals.data(), 0x7f, kMaxGpus * 8, stream), "enter");
  }
  CallCounter* counter() const { return reinterpret_cast<CallCounter*>(calls.data()); }
};

void bench(int64_t k, int ranks, const Deadline& deadline, cudaStream_t stream) {
  const LtContext context;
  const FusedRsShape shape{kM, kN, k, 0, ranks, DType::bf16, DType::bf16};
  const DeviceMemory x_memory(size_t(kM * k) * 2), weight_memory(size_t(kN * k) * 2),
      product(size_t(kM * kN) * 2), send_buffer(size_t(ranks) * shape.slot_bytes());
  const Tensor x = x_memory.view(DType::bf16, {kM, k}),
               weight = weight_memory.view(DType::bf16, {kN, k});
  fill_uniform(x, 3, 1, 0, stream);
  fill_uniform(weight, 3, 2, 0, stream);
  const LtGemm gemm(context, {.m = kM, .n = kN, .k = k});
  std::vector<Candidate> all;
  all.push_back(
      {"gemm", [&] { gemm.run(x.data(), weight.data(), product.data(), nullptr, stream); }, {}});

  const int64_t arrived_tiles = (ranks - 1) * shape.slices();
  const DeviceMemory uncompressed_out(size_t(kM / ranks * kN) * 2),
      local_out(size_t(kM / ranks * kN) * 2);
  const Tensor uncompressed = uncompressed_out.view(DType::bf16, {kM / ranks, kN}),
               local = local_out.view(DType::bf16, {kM / ranks, kN});
  const auto fused = make_fused_rs(shape);
  const Staging stored(size_t(ranks - 1) * shape.slot_bytes(), arrived_tiles, ranks, stream);
  for (int delivery = 0; delivery < int(fused->deliveries().size()); ++delivery) {
    const TileDelivery& is = fused->deliveries()[size_t(delivery)];
    if (is.chunks > 0 || is.later > 0) continue;
    all.push_back({is.between ? "local tiles between" : "fused",
                   [&, delivery] {
                     fused->launch({.x = x.data(),
                                    .weight = weight.data(),
                                    .out = uncompressed.data(),
                                    .scales = {},
                                    .send_buffer = send_buffer.data(),
                                    .received = stored.memory.data(),
                                    .staging = stored.table,
                                    .ready_flags = 0,
                                    .arrived = kMaxGpus,
                                    .arrived_tiles = kArrivedTiles,
                                    .calls = stored.counter(),
                                    .counted = nullptr,
                                    .ready = nullptr,
                                    .sending = nullptr,
                                    .delivery = delivery,
                                    .deadline = deadline},
                                   stream);
                   },
                   {}});
  }
  std::vector<std::unique_ptr<EncodedRsKernel>> kernels;
  std::vector<std::unique_ptr<Staging>> staged;
  Errors errors;
  all[1].run();
  const std::vector<float> expected = read(uncompressed, stream);
  for (const char* text : {"int8", "int4", "int4:g32"}) {
    kernels.push_back(make_encoded_rs_kernel(Wire::parse(text), shape));
    EncodedRsKernel* const kernel = kernels.back().get();
    staged.push_back(std::make_unique<Staging>(size_t(arrived_tiles) * kernel->slice_bytes(),
                                               arrived_tiles, ranks, stream));
    for (const bool between : {false, true}) {
      if (between && !kernel->has_between()) continue;
      const Staging* const at = staged.back().get();
      all.push_back({fmt::format("{}{}", text, between ? " between" : ""),
                     [&, kernel, at, between] {
                       kernel->launch({.x = x.data(),
                                       .weight = weight.data(),
                                       .out = local.data(),
                                       .staging = at->table,
                                       .ready_flags = 0,
                                       .arrived_tiles = kArrivedTiles,
                                       .calls = at->counter(),
                                       .between = between,
                                       .deadline = deadline},
                                      stream);
                     },
                     {}});
      all.back().run();
      errors.emplace_back(all.back().name, difference(read(local, stream), expected));
    }
  }
  measure(all, kRepeats, Flush(stream), stream);
  print(fmt::format("\"m\":{},\"n\":{},\"k\":{},\"ranks\":{}", kM, kN, k, ranks), all, errors,
        2e-6 * double(kM * kN * k));
  require_close(errors);
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  return tandem::gpu::run_bench(argc, argv,
                                [](int ranks, const auto& deadline, cudaStream_t stream) {
                                  for (const int64_t k : {2048, 7168})
                                    tandem::bench(k, ranks, deadline, stream);
                                });
}
