// gpu_encoded_ag_bench [RANKS]: cost to the GEMM of encoding and decoding shards within an AG+GEMM.
// Runs one rank's kernels with the whole GPU, on the shapes of Llama-70B's first projections (M
// 4096, TP 4): only cuBLASLt's GEMM; AG+GEMM whose copy warps send bf16; the same in wire formats.
// The rank plays all ranks: it receives its own data as every other rank's shard. Nothing crosses a
// link, so times show the cost of the kernels, not the savings. Checked in the same run: GEMMs of
// decoded data against those of bf16. Prints one JSON object per line.
#include <memory>

#include "bench/gpu_candidates.h"
#include "codec/message.h"
#include "codec/numbers.h"
#include "core/cuda/fill.h"
#include "gemm/cuda/gemm_lt.h"
#include "overlap/ag_gemm/cuda/fused.h"
#include "schedule/ring.h"
#include "tandem/codec.h"

namespace tandem {
namespace {

using namespace gpu;

constexpr int64_t kM = 4096, kK = 8192;
constexpr int kRepeats = 21;
constexpr int kChunks = int(kK * 2 / kCopyItemBytes), kGroups = 3;
// Above any link's bandwidth, so that copy warps run at full speed.
constexpr int kUnpaced = 4000;

/// Flags and rows of one gather, with every rank marked as ready.
struct Gather {
  DeviceMemory rows, inbox, words, decoded, calls;
  int ranks;
  size_t shard_bytes, source_bytes;

  Gather(int size, size_t message_bytes, cudaStream_t stream)
      : rows(size_t(kM * kK) * 2),
        inbox(size_t(kM) * kChunks * message_bytes + 16),
        words(size_t(kMaxGpus * (2 + kChunks)) * 8),
        decoded(size_t(kMaxGpus * kChunks) * 8),
        calls(sizeof(CallCounter)),
        ranks(size),
        shard_bytes(rows.bytes() / size_t(size)),
        source_bytes(size_t(kM / size) * kChunks * message_bytes) {
    check(cudaMemsetAsync(words.data(), 0x7f, kMaxGpus * 8, stream), "enter");
  }
  uint64_t* ready_flags() const { return reinterpret_cast<uint64_t*>(words.data()); }
  uint64_t* arrived() const { return ready_flags() + 2 * kMaxGpus; }

  /// `to`: memory of all sources, `bytes` each.
  void fill(ShardRoute& route, const Tensor& x, std::byte* to, size_t bytes,
            const Deadline& deadline) {
    route.targets = ranks - 1;
    route.bytes_per_ns = kUnpaced;
    route.groups = kGroups;
    route.from = static_cast<const std::byte*>(x.data());
    route.rows = int(kM / ranks);
    route.row_bytes = int(kK) * 2;
    route.chunks = kChunks;
    for (int stop = 0; stop < route.targets; ++stop) {
      const int as = schedule::ag_target(0, ranks, stop + 1);
      route.to[stop] = to + size_t(as) * bytes;
      route.arrived[stop] = arrived() + as * kChunks;
      route.enter[stop] = ready_flags() + kMaxGpus + as;
      route.ready_flags[stop] = ready_flags() + as;
      route.rank_of[stop] = as;
    }
    route.calls = reinterpret_cast<CallCounter*>(calls.data());
    route.deadline = deadline;
  }
  FusedAgArgs make_args(const Tensor& x, const Tensor& weight, const Tensor& out, int head,
                        bool encoded, const Deadline& deadline) {
    FusedAgArgs args{};
    args.local = x.data();
    args.gathered = rows.data();
    args.weight = weight.data();
    args.out = out.data();
    args.head = head;
    fill(args.route, x, rows.data(), shard_bytes, deadline);
    args.arrivals = {.arrived = encoded ? reinterpret_cast<uint64_t*>(decoded.data()) : arrived(),
                     .chunks = kChunks,
                     .chunk_bytes = kCopyItemBytes,
                     .epoch = &args.route.calls->epoch,
                     .ahead = 1,
                     .counts_per_chunk = unsigned(kM / ranks),
                     .deadline = deadline};
    if (!encoded) return args;
    fill(args.encoded, x, inbox.data(), source_bytes, deadline);
    args.encoded.size = ranks;
    args.encoded.inbox = inbox.data();
    args.encoded.received = arrived();
    args.encoded.gathered = rows.data();
    args.encoded.decoded = reinterpret_cast<uint64_t*>(decoded.data());
    args.encoded.limit = codec::largest_of(DType::bf16);
    return args;
  }
};

void bench(int64_t n, int ranks, const Deadline& deadline, cudaStream_t stream) {
  const LtContext context;
  const DeviceMemory whole(size_t(kM * kK) * 2), weight_memory(size_t(n * kK) * 2),
      product(size_t(kM * n) * 2), uncompressed_out(size_t(kM * n) * 2),
      local_out(size_t(kM * n) * 2);
  const Tensor x = whole.view(DType::bf16, {kM, kK}).rows(0, kM / ranks),
               weight = weight_memory.view(DType::bf16, {n, kK}),
               uncompressed = uncompressed_out.view(DType::bf16, {kM, n}),
               local = local_out.view(DType::bf16, {kM, n});
  fill_uniform(whole.view(DType::bf16, {kM, kK}), 3, 1, 0, stream);
  fill_uniform(weight, 3, 2, 0, stream);
  const LtGemm gemm(context, {.m = kM, .n = n, .k = kK});
  std::vector<Candidate> all;
  all.push_back({"gemm",
                 [&] { gemm.run(whole.data(), weight.data(), product.data(), nullptr, stream); },
                 {}});
  const FusedAgShape shape{kM, n, kK, 0, ranks, DType::bf16, DType::bf16, {8, 4}};
  std::vector<std::unique_ptr<FusedAgKernel>> kernels;
  std::vector<std::unique_ptr<Gather>> gathers;
  const auto add = [&](const std::string& name, std::unique_ptr<FusedAgKernel> kernel,
                       size_t message_bytes, const Tensor& out) {
    kernels.push_back(std::move(kernel));
    gathers.push_back(std::make_unique<Gather>(ranks, message_bytes, stream));
    for (const int head : {8, 4}) {
      const FusedAgArgs args =
          gathers.back()->make_args(x, weight, out, head, message_bytes > 0, deadline);
      all.push_back({fmt::format("{} {}/8", name, head),
                     [args, at = kernels.back().get(), stream] { at->launch(args, stream); },
                     {}});
    }
  };
  add("copy warps", make_fused_ag_128x256(shape), 0, uncompressed);
  all.back().run();
  const std::vector<float> expected = read(uncompressed, stream);
  const std::pair<const char*, std::unique_ptr<FusedAgKernel> (*)(const FusedAgShape&)> made[] = {
      {"int8", make_encoded_ag_int8},
      {"int4", make_encoded_ag_int4},
      {"int4:g32", make_encoded_ag_int4_g32}};
  Errors errors;
  for (const auto& each : made) {
    const Wire wire = Wire::parse(each.first);
    add(each.first, each.second(shape),
        size_t(encoded_chunk_bytes(codec::code_bits(wire.codec), wire.group)), local);
    all.back().run();
    errors.emplace_back(each.first, difference(read(local, stream), expected));
  }
  measure(all, kRepeats, Flush(stream), stream);
  print(fmt::format("\"m\":{},\"n\":{},\"k\":{},\"ranks\":{}", kM, n, kK, ranks), all, errors,
        2e-6 * double(kM * n * kK));
  require_close(errors);
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  return tandem::gpu::run_bench(argc, argv,
                                [](int ranks, const auto& deadline, cudaStream_t stream) {
                                  for (const int64_t n : {2560, 14336})
                                    tandem::bench(n, ranks, deadline, stream);
                                });
}
