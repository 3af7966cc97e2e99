#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bench/bench_collective.h"
#include "bench/cuda/bench_setting.h"
#include "bench/cuda/verify.h"
#include "collectives/cuda/all_reduce.h"
#include "collectives/cuda/chunk_sizes.h"
#include "collectives/cuda/encoded_collectives.h"
#include "collectives/cuda/shard_exchange.h"
#include "collectives/cuda/uncompressed_nccl.h"
#include "core/cuda/graph.h"
#include "tandem/collectives.h"

namespace tandem::gpu {
namespace {

// Runs, checks and times `candidates`, NCCL's first. `check_result` checks `out`. `encoding_error`:
// bound of max_rel of the encoded ones, 0 if they are exact. If the last one is encoded, all others
// are serial.
void measure_collective(const Setting& at, const std::vector<BoundCandidate>& candidates,
                        double encoding_error, const Tensor& out,
                        const std::function<Verdict()>& check_result, BenchResult& result) {
  GpuCommunicator& comm = at.comm;
  const cudaStream_t stream = comm.stream();
  std::vector<BoundCandidate> alternatives;
  std::vector<std::unique_ptr<Graph>> graphs;
  for (const BoundCandidate& candidate : candidates) {
    uint64_t first = 0;
    bool equal = true;
    for (int i = 0; i < kEqualRuns; ++i) {
      poison(out, stream);
      candidate.run();
      comm.synchronize();
      const uint64_t bits = digest(out, stream);
      if (i == 0) first = bits;
      equal = equal && bits == first;
    }
    const Verdict verdict = check_result();
    const auto worst = comm.slowest(std::vector<double>{
        verdict.max_rel, verdict.of_bound, double(verdict.not_finite), equal ? 0.0 : 1.0});
    result.max_rel = std::max(result.max_rel, worst[0]);
    // NCCL may round between ranks; only our algorithms must meet the bound of a single rounding.
    if (candidate.encoded && encoding_error > 0) {
      result.of_bound = std::max(result.of_bound, worst[0] / encoding_error);
    } else if (candidate.name != "nccl") {
      result.of_bound = std::max(result.of_bound, worst[1]);
    }
    result.finite = result.finite && worst[2] == 0;
    result.bitwise_equal_runs = result.bitwise_equal_runs && worst[3] == 0;
    graphs.push_back(std::make_unique<Graph>(stream, candidate.run));
    alternatives.push_back({.name = candidate.name, .run = [graph = graphs.back().get(), stream] {
                              graph->launch(stream);
                            }});
  }
  const auto times = at.stopwatch.measure(alternatives, at.options);
  for (size_t i = 0; i < candidates.size(); ++i) {
    // Ranks that share a GPU have no NCCL: our kernels replace it.
    const bool stands_in = i == 0 && at.comm.shares_gpu();
    const bool encoded = candidates[i].encoded;
    const bool serial = i == 0 || (!encoded && candidates.back().encoded);
    result.add(stands_in ? "serial_pipelined" : candidates[i].name,
               serial ? Strategy::serial : Strategy::overlapped, times_of(times[i]), encoded);
  }
  if (!at.comm.shares_gpu()) result.nccl = result.serial;
  result.graph = true;
}

/// Bound of max_rel if `errors` errors of the format add up, for values up to 1.
double encoding_error(const BenchRequest& c, double errors) {
  return c.wire.is_exact() ? 0 : errors * c.wire.error_bound() + 0x1p-7;
}
BoundCandidate encoded_candidate(const BenchRequest& c, std::function<void()> run) {
  return {.name = c.wire.describe(), .run = std::move(run), .encoded = true};
}

void run_all_reduce(const Setting& at, const BenchRequest& c, BenchResult& result) {
  GpuCommunicator& comm = at.comm;
  AllReduce op(comm, c.m * c.n, c.dtype);
  const size_t bytes = size_t(c.m * c.n) * size_of(c.dtype);
  const DeviceMemory in_memory(bytes), out_memory(bytes);
  const Tensor in = in_memory.view(c.dtype, {c.m, c.n}), out = out_memory.view(c.dtype, {c.m, c.n});
  fill_uniform(in, kSeed, kX + uint64_t(comm.rank()), 0, comm.stream());
  std::vector<BoundCandidate> candidates;
  for (const AllReduceAlgorithm candidate :
       {AllReduceAlgorithm::nccl, AllReduceAlgorithm::one_shot, AllReduceAlgorithm::two_shot,
        AllReduceAlgorithm::pipelined}) {
    if (!op.fits(c.m * c.n, candidate)) continue;
    candidates.push_back({.name = std::string(name_of(candidate)),
                          .run = [&, candidate] { op.run(in, out, candidate); }});
  }
  std::optional<EncodedCollectives> encoded;
  if (!c.wire.is_none() && comm.size() > 1) {
    encoded.emplace(comm, c.wire, c.dtype, EncodedCollectives::largest_sum(c.m * c.n, comm.size()));
    candidates.push_back(encoded_candidate(c, [&] { encoded->all_reduce(in, out); }));
    const auto shard = shard_of(c.m * c.n, comm.size(), 0).count;
    result.wire_bytes = 2 * int64_t(c.wire.bytes(shard, c.dtype)) * (comm.size() - 1);
  }
  const double twice = 2 + c.wire.error_bound();  // the sum is encoded once more
  measure_collective(
      at, candidates, encoding_error(c, comm.size() * twice), out,
      [&] { return verify_sum(out, kSeed, kX, comm.size(), comm.stream()); }, result);
  result.bytes = 2 * int64_t(bytes - bytes / size_t(comm.size()));
}

void fill_shard(const GpuCommunicator& comm, BenchData data, const Tensor& rows, int owner,
                int rank) {
  const uint64_t seed = kSeed + uint64_t(owner), stream = kX + uint64_t(rank);
  if (data == BenchData::normal) return fill_normal(rows, seed, stream, 0, comm.stream());
  fill_uniform(rows, seed, stream, 0, comm.stream());
}
// Fills shard p of rank r's data with seed kSeed + p, stream kX + r.
void fill_shards(const GpuCommunicator& comm, BenchData data, const Tensor& whole, int rank) {
  for (int p = 0; p < comm.size(); ++p) {
    const Shard rows = shard_of(whole.dim(0), comm.size(), p);
    if (rows.count == 0) continue;
    fill_shard(comm, data, whole.rows(rows.begin, rows.count), p, rank);
  }
}

/// Compares `rows` with shard p of rank r.
Verdict verify_shard(const GpuCommunicator& comm, const Tensor& rows, int owner, int rank) {
  return verify_sum(rows, kSeed + uint64_t(owner), kX + uint64_t(rank), 1, comm.stream());
}
/// Passes only if bitwise equal.
Verdict verify_bits(const GpuCommunicator& comm, const Tensor& out, uint64_t expected) {
  Verdict verdict;
  if (digest(out, comm.stream()) != expected) verdict.max_rel = verdict.of_bound = INFINITY;
  return verdict;
}
void join(Verdict& all, const Verdict& one) {
  all.max_rel = std::max(all.max_rel, one.max_rel);
  all.of_bound = std::max(all.of_bound, one.of_bound);
  all.not_finite += one.not_finite;
}
/// Bytes of `values` in the request's wire format; for `lossless`, whose messages have
/// data-dependent lengths, as the CPU codec encodes each chunk.
int64_t message_bytes(const GpuCommunicator& comm, const BenchRequest& c, const Tensor& values) {
  if (c.wire.codec != Codec::lossless) return int64_t(c.wire.bytes(values.elements(), c.dtype));
  std::vector<std::byte> host(values.bytes());
  comm.synchronize();  // a copy to pageable memory must not wait for a peer
  check(cudaMemcpyAsync(host.data(), values.data(), host.size(), cudaMemcpyDefault, comm.stream()),
        "read what is encoded");
  check(cudaStreamSynchronize(comm.stream()), "read what is encoded");
  const int64_t size = int64_t(size_of(c.dtype)), each = kLosslessChunkBytes / size;
  std::vector<std::byte> message(c.wire.bytes(each, c.dtype));
  int64_t bytes = 0;
  for (int64_t at = 0; at < values.elements(); at += each) {
    const Tensor chunk(host.data() + at * size, c.dtype, {std::min(each, values.elements() - at)});
    bytes += int64_t(encode(c.wire, chunk, message));
  }
  return bytes;
}
/// Bytes of the messages to all other ranks, one shard of `in` each.
int64_t bytes_sent(const GpuCommunicator& comm, const BenchRequest& c, const Tensor& in) {
  int64_t bytes = 0;
  for (int r = 0; r < comm.size(); ++r) {
    if (r == comm.rank()) continue;
    const Shard rows = shard_of(c.m, comm.size(), r);
    bytes += message_bytes(comm, c, in.rows(rows.begin, rows.count));
  }
  return bytes;
}
std::unique_ptr<EncodedCollectives> encoded_collectives(GpuCommunicator& comm,
                                                        const BenchRequest& c) {
  if (c.wire.is_none() || comm.size() == 1) return nullptr;
  return std::make_unique<EncodedCollectives>(comm, c.wire, c.dtype,
                                              shard_of(c.m, comm.size(), 0).count * c.n);
}

void run_all_gather(const Setting& at, const BenchRequest& c, BenchResult& result) {
  GpuCommunicator& comm = at.comm;
  const size_t bytes = size_t(c.m * c.n) * size_of(c.dtype);
  const DeviceMemory in_memory(bytes), out_memory(bytes);
  const Tensor in = in_memory.view(c.dtype, {c.m, c.n}), out = out_memory.view(c.dtype, {c.m, c.n});
  fill_shards(comm, data_of(c), in, 0);
  const uint64_t expected = digest(in, comm.stream());
  const Shard local = shard_of(c.m, comm.size(), comm.rank());
  const Tensor shard = in.rows(local.begin, local.count);
  ShardExchange* exchange = comm.size() > 1 ? &shard_exchange(comm) : nullptr;
  std::vector<BoundCandidate> candidates{
      {.name = "nccl", .run = [&] { nccl_all_gather(comm, shard, out); }}};
  for (const ShardAlgorithm candidate : {ShardAlgorithm::one_shot, ShardAlgorithm::pipelined}) {
    if (!exchange || !exchange->fits(out, candidate)) continue;
    candidates.push_back({.name = std::string(name_of(candidate)), .run = [=, &shard, &out] {
                            exchange->all_gather(shard, out, candidate);
                          }});
  }
  if (!c.wire.is_none() && comm.size() > 1) {
    candidates.push_back(encoded_candidate(c, [&] { all_gather(comm, shard, out, c.wire); }));
    result.wire_bytes = message_bytes(comm, c, shard) * (comm.size() - 1);
  }
  const auto check_result = [&] {
    Verdict verdict = verify_bits(comm, out, expected);
    if (verdict.of_bound == 0 || c.wire.is_exact()) return verdict;
    verdict = {};
    for (int p = 0; p < comm.size(); ++p) {  // encoded: compares within the error bound
      const Shard rows = shard_of(c.m, comm.size(), p);
      if (rows.count) join(verdict, verify_shard(comm, out.rows(rows.begin, rows.count), p, 0));
    }
    return verdict;
  };
  measure_collective(at, candidates, encoding_error(c, 1), out, check_result, result);
  result.bytes = int64_t(shard.bytes()) * (comm.size() - 1);
}

void run_reduce_scatter(const Setting& at, const BenchRequest& c, BenchResult& result) {
  GpuCommunicator& comm = at.comm;
  const Shard local = shard_of(c.m, comm.size(), comm.rank());
  const DeviceMemory in_memory(size_t(c.m * c.n) * size_of(c.dtype)),
      out_memory(size_t(local.count * c.n) * size_of(c.dtype));
  const Tensor in = in_memory.view(c.dtype, {c.m, c.n}),
               out = out_memory.view(c.dtype, {local.count, c.n});
  fill_shards(comm, data_of(c), in, comm.rank());
  ShardExchange* exchange = comm.size() > 1 ? &shard_exchange(comm) : nullptr;
  std::vector<BoundCandidate> candidates{
      {.name = "nccl", .run = [&] { nccl_reduce_scatter(comm, in, out, ReduceOp::sum); }}};
  for (const ShardAlgorithm candidate : {ShardAlgorithm::one_shot, ShardAlgorithm::pipelined}) {
    if (!exchange || !exchange->fits(in, candidate)) continue;
    candidates.push_back({.name = std::string(name_of(candidate)),
                          .run = [=, &in, &out] { exchange->reduce_scatter(in, out, candidate); }});
  }
  const auto encoded = encoded_collectives(comm, c);
  if (encoded) {
    candidates.push_back(encoded_candidate(c, [&] { encoded->reduce_scatter(in, out); }));
    result.wire_bytes = bytes_sent(comm, c, in);
  }
  measure_collective(
      at, candidates, encoding_error(c, comm.size()), out,
      [&] {
        return verify_sum(out, kSeed + uint64_t(comm.rank()), kX, comm.size(), comm.stream());
      },
      result);
  result.bytes = int64_t(in.bytes() - out.bytes());
}

// Equal or nearly equal splits.
void run_all_to_all(const Setting& at, const BenchRequest& c, BenchResult& result) {
  GpuCommunicator& comm = at.comm;
  const Shard local = shard_of(c.m, comm.size(), comm.rank());
  const int64_t received = local.count * comm.size();
  const DeviceMemory in_memory(size_t(c.m * c.n) * size_of(c.dtype)),
      out_memory(size_t(received * c.n) * size_of(c.dtype));
  const Tensor in = in_memory.view(c.dtype, {c.m, c.n}),
               out = out_memory.view(c.dtype, {received, c.n});
  fill_shards(comm, data_of(c), in, comm.rank());
  std::vector<int64_t> send(size_t(comm.size())), recv(send.size(), local.count);
  for (int r = 0; r < comm.size(); ++r) send[size_t(r)] = shard_of(c.m, comm.size(), r).count;
  std::vector<BoundCandidate> candidates{
      {.name = "nccl", .run = [&] { all_to_all(comm, in, send, out, recv); }}};
  if (!c.wire.is_none() && comm.size() > 1) {
    candidates.push_back(
        encoded_candidate(c, [&] { all_to_all(comm, in, send, out, recv, c.wire); }));
    result.wire_bytes = bytes_sent(comm, c, in);
  }
  for (int r = 0; r < comm.size() && local.count; ++r) {
    fill_shard(comm, data_of(c), out.rows(r * local.count, local.count), comm.rank(), r);
  }
  const uint64_t expected = digest(out, comm.stream());
  const auto check_result = [&] {
    Verdict verdict = verify_bits(comm, out, expected);
    if (verdict.of_bound == 0 || c.wire.is_exact()) return verdict;
    verdict = {};
    for (int r = 0; r < comm.size() && local.count; ++r) {
      join(verdict, verify_shard(comm, out.rows(r * local.count, local.count), comm.rank(), r));
    }
    return verdict;
  };
  measure_collective(at, candidates, encoding_error(c, 1), out, check_result, result);
  result.bytes = int64_t(in.bytes()) - local.count * c.n * int64_t(size_of(c.dtype));
}

}  // namespace

bool is_collective(const std::string& op) {
  const BenchCollective* collective = find_collective(op);
  return collective && collective->op != NativeOp::broadcast;
}

void run_collective(const Setting& at, const BenchRequest& request, BenchResult& result) {
  switch (find_collective(request.op)->op) {
    case NativeOp::all_reduce:
      return run_all_reduce(at, request, result);
    case NativeOp::all_gather:
      return run_all_gather(at, request, result);
    case NativeOp::reduce_scatter:
      return run_reduce_scatter(at, request, result);
    case NativeOp::all_to_all:
      return run_all_to_all(at, request, result);
    case NativeOp::broadcast:
      break;
  }
}

}  // namespace tandem::gpu
