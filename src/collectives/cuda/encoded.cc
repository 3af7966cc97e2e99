// Collectives over wire formats on GPU ranks: their checks, and staging that is allocated at the
// first call of each format.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <vector>

#include "codec/cuda/encode.h"
#include "codec/whole.h"
#include "collectives/cuda/encoded_check.h"
#include "collectives/cuda/encoded_collectives.h"
#include "collectives/cuda/encoded_pairs.h"
#include "collectives/gpu.h"
#include "collectives/rows/rows.h"

namespace tandem::gpu {
namespace {

// Instances by size. A smaller one is kept when a larger one is created: captured calls still use
// its memory.
struct EncodedBySize {
  std::map<std::pair<std::string, DType>, std::vector<std::unique_ptr<EncodedCollectives>>> of;
};

EncodedCollectives& encoded(GpuCommunicator& comm, const Wire& wire, DType dtype, int64_t largest) {
  auto& all =
      comm.attached<EncodedBySize>([] { return new EncodedBySize; }).of[{wire.describe(), dtype}];
  for (const auto& one : all) {
    if (one->largest() >= largest) return *one;
  }
  // At least twice the previous, so that the total is at most twice the largest.
  const int64_t maximum =
      std::max({largest, int64_t(1) << 16, all.empty() ? 0 : 2 * all.back()->largest()});
  all.push_back(std::make_unique<EncodedCollectives>(comm, wire, dtype, maximum));
  return *all.back();
}

int64_t largest_shard(const GpuCommunicator& comm, const Tensor& whole) {
  if (whole.elements() == 0) return 0;
  const int64_t rows = whole.dim(0);
  return shard_of(rows, comm.size(), 0).count * (whole.elements() / rows);
}

EncodedPairExchange& pair_exchange(GpuCommunicator& comm) {
  return comm.attached<EncodedPairExchange>([&] { return new EncodedPairExchange(comm); });
}
EncodedPair pair_of(const Tensor& to, const Tensor& from) {
  return {to.as<const std::byte>(), to.elements(), from.as<std::byte>(), from.elements()};
}

/// Sends a separate message to each peer, since its length depends on the values.
void gather_in_pairs(GpuCommunicator& comm, const Tensor& shard, const Tensor& out,
                     const Wire& wire) {
  EncodedPairExchange& exchange = pair_exchange(comm);
  const Enqueueing enqueueing(comm);
  EncodedPairs pairs;
  for (int r = 0; r < comm.size(); ++r) {
    const Shard rows = shard_of(out.dim(0), comm.size(), r);
    pairs[size_t(r)] = pair_of(shard, out.rows(rows.begin, rows.count));
  }
  comm.enqueue([&] { exchange.run(OpId::all_gather, wire, out.dtype(), pairs); });
}

}  // namespace

void check_encoded(const GpuCommunicator& comm, const char* op, const Wire& wire,
                   std::initializer_list<Operand> tensors, const Tensor& data,
                   const Tensor* residual, Lossless lossless) {
  if (wire.codec == Codec::lossless && lossless == Lossless::sent) {
    codec::require_encodable(wire, data.dtype());
  } else {
    require_encodable_on_gpu(op, wire, data.dtype());
  }
  const auto check_memory = [&](std::string_view what, const Tensor& tensor) {
    if (tensor.contiguous() && tensor.device() == Device{DeviceKind::cuda, comm.device()}) return;
    throw InvalidArgument(fmt::format("{}: {} {}: expected a contiguous tensor on cuda {}", op,
                                      what, tensor.describe(), comm.device()));
  };
  for (const Operand& each : tensors) check_memory(each.name, *each.tensor);
  if (residual) {
    check_memory("residual", *residual);
    if (residual->dtype() != DType::f32 || residual->elements() != data.elements()) {
      throw InvalidArgument(
          fmt::format("{}: residual {} of data {}: expected f32 of as many elements", op,
                      residual->describe(), data.describe()));
    }
    require_apart(op, {{"residual", residual}}, {{"data", &data}});
  }
  comm.check_device();
  if (comm.one_node()) return;
  throw Unsupported(fmt::format("{}: codec {}: expected GPUs that reach each other's memory", op,
                                wire.describe()));
}

void all_reduce(Communicator& any, const Tensor& data, const Wire& wire, const Tensor* residual) {
  GpuCommunicator& comm = as_gpu(any);
  check_encoded(comm, "all_reduce", wire, {{"data", &data}}, data, residual);
  if (comm.size() == 1 || data.elements() == 0) return;
  const int64_t largest = EncodedCollectives::largest_sum(data.elements(), comm.size());
  encoded(comm, wire, data.dtype(), largest).all_reduce(data, data, residual);
}

void reduce_scatter(Communicator& any, const Tensor& data, const Tensor& shard, const Wire& wire,
                    const Tensor* residual) {
  GpuCommunicator& comm = as_gpu(any);
  check_encoded(comm, "reduce_scatter", wire, {{"data", &data}, {"shard", &shard}}, data, residual);
  collectives::require_shard("reduce_scatter", comm, shard, data);
  collectives::require_shard_position("reduce_scatter", comm, shard, {"data", &data});
  if (data.elements() == 0) return;
  encoded(comm, wire, data.dtype(), largest_shard(comm, data))
      .reduce_scatter(data, shard, residual);
}

void all_gather(Communicator& any, const Tensor& shard, const Tensor& out, const Wire& wire) {
  GpuCommunicator& comm = as_gpu(any);
  check_encoded(comm, "all_gather", wire, {{"shard", &shard}, {"out", &out}}, out, nullptr,
                Lossless::sent);
  collectives::require_shard("all_gather", comm, shard, out);
  collectives::require_shard_position("all_gather", comm, shard, {"out", &out});
  if (out.elements() == 0) return;
  if (wire.codec == Codec::lossless) return gather_in_pairs(comm, shard, out, wire);
  encoded(comm, wire, out.dtype(), largest_shard(comm, out)).all_gather(shard, out);
}

void all_to_all(Communicator& any, const Tensor& send, std::span<const int64_t> send_counts,
                const Tensor& recv, std::span<const int64_t> recv_counts, const Wire& wire) {
  GpuCommunicator& comm = as_gpu(any);
  check_encoded(comm, "all_to_all", wire, {{"send", &send}, {"recv", &recv}}, send, nullptr,
                Lossless::sent);
  EncodedPairExchange& exchange = pair_exchange(comm);
  const Enqueueing enqueueing(comm);
  EncodedPairs pairs;
  const auto exchange_with = [&](int r, const Tensor& to, const Tensor& from) {
    pairs[size_t(r)] = pair_of(to, from);
  };
  collectives::for_each_pair(send, send_counts, recv, recv_counts, exchange_with);
  comm.enqueue([&] { exchange.run(OpId::all_to_all, wire, send.dtype(), pairs); });
}

}  // namespace tandem::gpu
