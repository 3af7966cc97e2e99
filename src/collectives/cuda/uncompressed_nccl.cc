#include "collectives/cuda/uncompressed_nccl.h"

#include <fmt/format.h>

#include "collectives/cuda/shard_exchange.h"
#include "collectives/cuda/uncompressed_pairs.h"
#include "comm/device/signal_kernels.h"
#include "core/cuda/graph.h"

namespace tandem::gpu {
namespace {

ncclRedOp_t nccl_op(ReduceOp op) {
  return op == ReduceOp::sum ? ncclSum : ncclMax;
}

ncclDataType_t nccl_type(const char* what, DType dtype) {
  switch (dtype) {
    case DType::f32:
      return ncclFloat32;
    case DType::bf16:
      return ncclBfloat16;
    case DType::f16:
      return ncclFloat16;
    case DType::i32:
      return ncclInt32;
    case DType::u8:
    case DType::e4m3:
      break;
  }
  throw InvalidArgument(
      fmt::format("{}: dtype {}: expected f32, bf16, f16 or i32", what, name_of(dtype)));
}

/// Signals of enter_nccl.
struct NcclEntry {
  explicit NcclEntry(GpuCommunicator& comm)
      : signals(comm.allocate(0, comm.size())), epoch(sizeof(uint64_t)) {}
  std::shared_ptr<SymmetricBuffer> signals;
  DeviceMemory epoch;
};

// Rows of `whole` that `rank` holds.
Tensor shard_in(const GpuCommunicator& comm, const Tensor& whole, int rank) {
  const Shard rows = shard_of(whole.dim(0), comm.size(), rank);
  return whole.rows(rows.begin, rows.count);
}

}  // namespace

void prepare_nccl(GpuCommunicator& comm) {
  if (comm.shares_gpu() && comm.one_node()) shard_exchange(comm);
}

void enter_nccl(GpuCommunicator& comm, OpId op) {
  if (!has_nccl(comm) || !comm.one_node() || comm.size() == 1) return;
  if (is_captured(comm.stream()) && !comm.has_attached<NcclEntry>()) return;
  auto& entry = comm.attached<NcclEntry>([&] { return new NcclEntry(comm); });
  launch_enter(static_cast<GpuBuffer&>(*entry.signals).table(), 0,
               {.epoch = reinterpret_cast<uint64_t*>(entry.epoch.data())}, comm.device_deadline(),
               op, comm.stream());
}

void nccl_all_reduce(GpuCommunicator& comm, const Tensor& in, const Tensor& out, ReduceOp op) {
  if (auto* one_gpu = as_one_gpu(comm)) {
    if (op == ReduceOp::sum && in.dtype() != DType::i32 && comm.size() > 1 && comm.one_node()) {
      return shard_exchange(comm).all_reduce(in, out);
    }
    return pairs_all_reduce(*one_gpu, in, out, op);
  }
  check(
      comm,
      ncclAllReduce(in.data(), out.data(), size_t(in.elements()),
                    nccl_type("all_reduce", in.dtype()), nccl_op(op), nccl_of(comm), comm.stream()),
      "ncclAllReduce");
}

void nccl_all_gather(GpuCommunicator& comm, const Tensor& shard, const Tensor& out) {
  if (auto* one_gpu = as_one_gpu(comm)) {
    if (!comm.one_node()) return pairs_all_gather(*one_gpu, shard, out);
    return shard_exchange(comm).all_gather(shard, out, ShardAlgorithm::pipelined);
  }
  if (out.dim(0) % comm.size() == 0) {
    return check(comm,
                 ncclAllGather(shard.data(), out.data(), shard.bytes(), ncclInt8, nccl_of(comm),
                               comm.stream()),
                 "ncclAllGather");
  }
  // In place: NCCL decides rank by rank whether memory is registered, and a root whose source is
  // not, unlike the receivers' windows, would send by another path than they read.
  const Tensor local = shard_in(comm, out, comm.rank());
  if (shard.data() != local.data()) {
    check(cudaMemcpyAsync(local.data(), shard.data(), shard.bytes(), cudaMemcpyDeviceToDevice,
                          comm.stream()),
          "copy a shard");
  }
  grouped(comm, [&] {
    for (int r = 0; r < comm.size(); ++r) {
      const Tensor rows = shard_in(comm, out, r);
      check(comm,
            ncclBroadcast(rows.data(), rows.data(), rows.bytes(), ncclInt8, r, nccl_of(comm),
                          comm.stream()),
            "ncclBroadcast");
    }
  });
}

void nccl_reduce_scatter(GpuCommunicator& comm, const Tensor& data, const Tensor& shard,
                         ReduceOp op) {
  if (auto* one_gpu = as_one_gpu(comm)) return pairs_reduce_scatter(*one_gpu, data, shard, op);
  const ncclDataType_t type = nccl_type("reduce_scatter", data.dtype());
  if (data.dim(0) % comm.size() == 0) {
    return check(comm,
                 ncclReduceScatter(data.data(), shard.data(), size_t(shard.elements()), type,
                                   nccl_op(op), nccl_of(comm), comm.stream()),
                 "ncclReduceScatter");
  }
  grouped(comm, [&] {
    for (int r = 0; r < comm.size(); ++r) {
      const Tensor rows = shard_in(comm, data, r);
      check(comm,
            ncclReduce(rows.data(), r == comm.rank() ? shard.data() : nullptr,
                       size_t(rows.elements()), type, nccl_op(op), r, nccl_of(comm), comm.stream()),
            "ncclReduce");
    }
  });
}

void nccl_exchange(GpuCommunicator& comm, const Tensor& sent, int to, const Tensor& received,
                   int from, cudaStream_t stream) {
  if (auto* one_gpu = as_one_gpu(comm)) {
    return pairs_exchange(*one_gpu, sent, to, received, from, stream);
  }
  grouped(comm, [&] {
    check(comm, ncclSend(sent.data(), sent.bytes(), ncclInt8, to, nccl_of(comm), stream),
          "ncclSend");
    check(comm, ncclRecv(received.data(), received.bytes(), ncclInt8, from, nccl_of(comm), stream),
          "ncclRecv");
  });
}

}  // namespace tandem::gpu
