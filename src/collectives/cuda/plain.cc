#include <fmt/format.h>

#include <map>

#include "collectives/cuda/all_reduce.h"
#include "collectives/gpu.h"

namespace tandem::gpu {
namespace {

constexpr int64_t kOwnBytes = int64_t(16) << 20;

// Staging of the sums that are ours, made at the first of each dtype.
struct PlainSums {
  std::map<DType, std::unique_ptr<AllReduce>> of;
};

void check_tensor(const NcclCommunicator& comm, const char* what, const Tensor& tensor) {
  if (tensor.contiguous() && tensor.device() == Device{DeviceKind::cuda, comm.device()}) return;
  throw InvalidArgument(fmt::format("{}: {} on {} {}: expected a contiguous tensor on cuda {}",
                                    what, tensor.describe(),
                                    tensor.device().kind == DeviceKind::cuda ? "cuda" : "cpu",
                                    tensor.device().index, comm.device()));
}

void check_peer(const NcclCommunicator& comm, const char* what, int peer) {
  if (peer >= 0 && peer < comm.size()) return;
  throw InvalidArgument(fmt::format("{}: rank {}: expected 0 to {}", what, peer, comm.size() - 1));
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

ncclRedOp_t nccl_op(ReduceOp op) {
  return op == ReduceOp::sum ? ncclSum : ncclMax;
}

// Rows of `whole` that `rank` holds.
Tensor part_of(const NcclCommunicator& comm, const Tensor& whole, int rank) {
  const Shard rows = shard_of(whole.dim(0), comm.size(), rank);
  return whole.rows(rows.begin, rows.count);
}

void check_shard(const NcclCommunicator& comm, const char* what, const Tensor& shard,
                 const Tensor& whole) {
  check_tensor(comm, what, shard);
  check_tensor(comm, what, whole);
  if (whole.dims() < 1 || shard.dtype() != whole.dtype() ||
      shard.elements() != part_of(comm, whole, comm.rank()).elements()) {
    throw InvalidArgument(fmt::format("{}: {} as this rank's rows of {}: expected {} of them", what,
                                      shard.describe(), whole.describe(),
                                      shard_of(whole.dim(0), comm.size(), comm.rank()).count));
  }
}

// Many NCCL calls as one.
template <typename Body>
void grouped(Body body) {
  check(ncclGroupStart(), "ncclGroupStart");
  body();
  check(ncclGroupEnd(), "ncclGroupEnd");
}

}  // namespace

void all_reduce(Communicator& any, const Tensor& data, ReduceOp op) {
  NcclCommunicator& comm = as_nccl(any);
  check_tensor(comm, "all_reduce", data);
  const ncclDataType_t type = nccl_type("all_reduce", data.dtype());
  comm.check_device();
  if (comm.size() == 1 || data.elements() == 0) return;
  if (op == ReduceOp::sum && data.dtype() != DType::i32 && comm.one_node() &&
      int64_t(data.bytes()) <= kOwnBytes && data.bytes() % 16 == 0) {
    auto& own = comm.attached<PlainSums>([] { return new PlainSums; }).of[data.dtype()];
    if (!own) {
      own = std::make_unique<AllReduce>(comm, kOwnBytes / int64_t(size_of(data.dtype())),
                                        data.dtype());
    }
    return own->run(data, data, own->choose(data.elements()));
  }
  check(ncclAllReduce(data.data(), data.data(), size_t(data.elements()), type, nccl_op(op),
                      comm.nccl(), comm.stream()),
        "ncclAllReduce");
}

void all_gather(Communicator& any, const Tensor& shard, const Tensor& out) {
  NcclCommunicator& comm = as_nccl(any);
  check_shard(comm, "all_gather", shard, out);
  comm.check_device();
  if (out.dim(0) % comm.size() == 0) {
    return check(ncclAllGather(shard.data(), out.data(), shard.bytes(), ncclInt8, comm.nccl(),
                               comm.stream()),
                 "ncclAllGather");
  }
  grouped([&] {
    for (int r = 0; r < comm.size(); ++r) {
      const Tensor rows = part_of(comm, out, r);
      check(ncclBroadcast(r == comm.rank() ? shard.data() : rows.data(), rows.data(), rows.bytes(),
                          ncclInt8, r, comm.nccl(), comm.stream()),
            "ncclBroadcast");
    }
  });
}

void reduce_scatter(Communicator& any, const Tensor& data, const Tensor& shard, ReduceOp op) {
  NcclCommunicator& comm = as_nccl(any);
  check_shard(comm, "reduce_scatter", shard, data);
  const ncclDataType_t type = nccl_type("reduce_scatter", data.dtype());
  comm.check_device();
  if (data.dim(0) % comm.size() == 0) {
    return check(ncclReduceScatter(data.data(), shard.data(), size_t(shard.elements()), type,
                                   nccl_op(op), comm.nccl(), comm.stream()),
                 "ncclReduceScatter");
  }
  grouped([&] {
    for (int r = 0; r < comm.size(); ++r) {
      const Tensor rows = part_of(comm, data, r);
      check(ncclReduce(rows.data(), r == comm.rank() ? shard.data() : nullptr,
                       size_t(rows.elements()), type, nccl_op(op), r, comm.nccl(), comm.stream()),
            "ncclReduce");
    }
  });
}

void all_to_all(Communicator& any, const Tensor& send, std::span<const int64_t> send_counts,
                const Tensor& recv, std::span<const int64_t> recv_counts) {
  NcclCommunicator& comm = as_nccl(any);
  check_tensor(comm, "all_to_all", send);
  check_tensor(comm, "all_to_all", recv);
  const auto rows = [&](const Tensor& tensor, std::span<const int64_t> counts) {
    int64_t sum = 0;
    for (const int64_t count : counts) sum += count;
    if (int(counts.size()) != comm.size() || tensor.dims() < 1 || tensor.dim(0) < sum) {
      throw InvalidArgument(
          fmt::format("all_to_all: {} counts with {} rows in all for {}: expected {} that fit",
                      counts.size(), sum, tensor.describe(), comm.size()));
    }
  };
  rows(send, send_counts);
  rows(recv, recv_counts);
  comm.check_device();
  grouped([&] {
    int64_t sent = 0, received = 0;
    for (int r = 0; r < comm.size(); ++r) {
      const Tensor to = send.rows(sent, send_counts[size_t(r)]);
      const Tensor from = recv.rows(received, recv_counts[size_t(r)]);
      sent += to.dim(0);
      received += from.dim(0);
      check(ncclSend(to.data(), to.bytes(), ncclInt8, r, comm.nccl(), comm.stream()), "ncclSend");
      check(ncclRecv(from.data(), from.bytes(), ncclInt8, r, comm.nccl(), comm.stream()),
            "ncclRecv");
    }
  });
}

void broadcast(Communicator& any, const Tensor& data, int root) {
  NcclCommunicator& comm = as_nccl(any);
  check_tensor(comm, "broadcast", data);
  check_peer(comm, "broadcast", root);
  comm.check_device();
  check(ncclBroadcast(data.data(), data.data(), data.bytes(), ncclInt8, root, comm.nccl(),
                      comm.stream()),
        "ncclBroadcast");
}

void send(Communicator& any, const Tensor& data, int peer) {
  NcclCommunicator& comm = as_nccl(any);
  check_tensor(comm, "send", data);
  check_peer(comm, "send", peer);
  comm.check_device();
  check(ncclSend(data.data(), data.bytes(), ncclInt8, peer, comm.nccl(), comm.stream()),
        "ncclSend");
}

void recv(Communicator& any, const Tensor& data, int peer) {
  NcclCommunicator& comm = as_nccl(any);
  check_tensor(comm, "recv", data);
  check_peer(comm, "recv", peer);
  comm.check_device();
  check(ncclRecv(data.data(), data.bytes(), ncclInt8, peer, comm.nccl(), comm.stream()),
        "ncclRecv");
}

}  // namespace tandem::gpu
