#include <fmt/format.h>

#include <map>

#include "collectives/cuda/all_reduce.h"
#include "collectives/cuda/shard_exchange.h"
#include "collectives/cuda/uncompressed_nccl.h"
#include "collectives/cuda/uncompressed_pairs.h"
#include "collectives/gpu.h"
#include "collectives/reduce.h"
#include "collectives/rows/rows.h"

namespace tandem::gpu {
namespace {

// AllReduce handles sums of up to this size.
constexpr int64_t kStagedBytes = int64_t(16) << 20;
// On more than two GPUs NCCL reduces larger tensors as fast.
constexpr int64_t kMaxReducedBytes = int64_t(64) << 20;

// Staging of our own sums, created at the first one of each dtype.
struct UncompressedSums {
  std::map<DType, std::unique_ptr<AllReduce>> of;
};

void check_tensor(const GpuCommunicator& comm, const char* what, const Tensor& tensor) {
  if (tensor.contiguous() && tensor.device() == Device{DeviceKind::cuda, comm.device()}) return;
  throw InvalidArgument(fmt::format("{}: {} on {} {}: expected a contiguous tensor on cuda {}",
                                    what, tensor.describe(),
                                    tensor.device().kind == DeviceKind::cuda ? "cuda" : "cpu",
                                    tensor.device().index, comm.device()));
}

void check_peer(const GpuCommunicator& comm, const char* what, int peer) {
  if (peer >= 0 && peer < comm.size()) return;
  throw InvalidArgument(fmt::format("{}: rank {}: expected 0 to {}", what, peer, comm.size() - 1));
}

void check_shard(const GpuCommunicator& comm, const char* what, const Tensor& shard,
                 const Operand& whole) {
  check_tensor(comm, what, shard);
  check_tensor(comm, what, *whole.tensor);
  collectives::require_shard(what, comm, shard, *whole.tensor);
  collectives::require_shard_position(what, comm, shard, whole);
}

struct FreeOnStream {
  cudaStream_t stream = nullptr;
  void operator()(void* memory) const { cudaFreeAsync(memory, stream); }
};

// A tensor, or a 16-byte aligned copy of one that is not: the other ranks' may be.
class Aligned {
 public:
  Aligned(const Tensor& tensor, cudaStream_t stream)
      : data(tensor), original_(tensor), stream_(stream) {
    if (reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0) return;
    void* copy = nullptr;
    check(cudaMallocAsync(&copy, tensor.bytes(), stream), "allocate an aligned copy");
    copy_ = {copy, FreeOnStream{stream}};
    data = Tensor(copy, tensor.dtype(), {tensor.elements()}, tensor.device());
    move(data, tensor);
  }
  void put_back() const {
    if (copy_) move(original_, data);
  }

  Tensor data;

 private:
  void move(const Tensor& to, const Tensor& from) const {
    check(cudaMemcpyAsync(to.data(), from.data(), from.bytes(), cudaMemcpyDefault, stream_),
          "copy to or from an aligned place");
  }

  Tensor original_;
  cudaStream_t stream_;
  std::unique_ptr<void, FreeOnStream> copy_;
};

// Single-rank form of a collective.
void copy_alone(const GpuCommunicator& comm, const Tensor& from, const Tensor& to) {
  if (from.data() == to.data() || from.bytes() == 0) return;
  check(cudaMemcpyAsync(to.data(), from.data(), from.bytes(), cudaMemcpyDefault, comm.stream()),
        "copy the whole of a single rank");
}

// True if our kernels compute this sum: the same on all ranks.
bool is_our_sum(const GpuCommunicator& comm, DType dtype, ReduceOp op) {
  return comm.one_node() && op == ReduceOp::sum && dtype != DType::i32;
}

bool is_our_reduction(const GpuCommunicator& comm, const Tensor& data) {
  return data.bytes() % 16 == 0 && (comm.size() <= 2 || int64_t(data.bytes()) <= kMaxReducedBytes);
}

}  // namespace

void all_reduce(Communicator& any, const Tensor& data, ReduceOp op) {
  GpuCommunicator& comm = as_gpu(any);
  check_tensor(comm, "all_reduce", data);
  collectives::require_reducible("all_reduce", data.dtype());
  comm.check_device();
  if (comm.size() == 1 || data.elements() == 0) return;
  if (!is_our_sum(comm, data.dtype(), op) || !is_our_reduction(comm, data)) {
    enter_nccl(comm, OpId::all_reduce);
    return nccl_all_reduce(comm, data, data, op);
  }
  if (int64_t(data.bytes()) > kStagedBytes) return shard_exchange(comm).all_reduce(data, data);
  auto& local =
      comm.attached<UncompressedSums>([] { return new UncompressedSums; }).of[data.dtype()];
  if (!local) {
    local = std::make_unique<AllReduce>(comm, kStagedBytes / int64_t(size_of(data.dtype())),
                                        data.dtype());
  }
  const Aligned aligned(data, comm.stream());
  local->run(aligned.data, aligned.data, local->choose(data.elements()));
  aligned.put_back();
}

void all_gather(Communicator& any, const Tensor& shard, const Tensor& out) {
  GpuCommunicator& comm = as_gpu(any);
  check_shard(comm, "all_gather", shard, {"out", &out});
  comm.check_device();
  if (comm.size() == 1) return copy_alone(comm, shard, out);
  if (out.bytes() == 0) return;
  if (comm.one_node()) {
    ShardExchange& exchange = shard_exchange(comm);
    return exchange.all_gather(shard, out, exchange.choose(out));
  }
  nccl_all_gather(comm, shard, out);
}

void reduce_scatter(Communicator& any, const Tensor& data, const Tensor& shard, ReduceOp op) {
  GpuCommunicator& comm = as_gpu(any);
  check_shard(comm, "reduce_scatter", shard, {"data", &data});
  collectives::require_reducible("reduce_scatter", data.dtype());
  comm.check_device();
  if (comm.size() == 1) return copy_alone(comm, data, shard);
  if (data.bytes() == 0) return;
  if (is_our_sum(comm, data.dtype(), op)) {
    ShardExchange& exchange = shard_exchange(comm);
    const ShardAlgorithm algorithm = exchange.choose(data);
    // If shards are not whole 16-byte vectors, sums are byte-wise, which takes longer than the
    // transfer.
    if (algorithm == ShardAlgorithm::one_shot ||
        has_whole_vecs(partition_of(comm.size(), data, data, shard), comm.size())) {
      return exchange.reduce_scatter(data, shard, algorithm);
    }
  }
  enter_nccl(comm, OpId::reduce_scatter);
  nccl_reduce_scatter(comm, data, shard, op);
}

void all_to_all(Communicator& any, const Tensor& send, std::span<const int64_t> send_counts,
                const Tensor& recv, std::span<const int64_t> recv_counts) {
  GpuCommunicator& comm = as_gpu(any);
  check_tensor(comm, "all_to_all", send);
  check_tensor(comm, "all_to_all", recv);
  comm.check_device();
  if (auto* one_gpu = as_one_gpu(comm)) {
    return pairs_all_to_all(*one_gpu, send, send_counts, recv, recv_counts);
  }
  enter_nccl(comm, OpId::all_to_all);
  grouped(comm, [&] {
    const auto exchange = [&](int r, const Tensor& to, const Tensor& from) {
      check(comm, ncclSend(to.data(), to.bytes(), ncclInt8, r, nccl_of(comm), comm.stream()),
            "ncclSend");
      check(comm, ncclRecv(from.data(), from.bytes(), ncclInt8, r, nccl_of(comm), comm.stream()),
            "ncclRecv");
    };
    collectives::for_each_pair(send, send_counts, recv, recv_counts, exchange);
  });
}

void broadcast(Communicator& any, const Tensor& data, int root) {
  GpuCommunicator& comm = as_gpu(any);
  check_tensor(comm, "broadcast", data);
  check_peer(comm, "broadcast", root);
  comm.check_device();
  if (auto* one_gpu = as_one_gpu(comm)) return pairs_broadcast(*one_gpu, data, root);
  enter_nccl(comm, OpId::broadcast);
  check(comm,
        ncclBroadcast(data.data(), data.data(), data.bytes(), ncclInt8, root, nccl_of(comm),
                      comm.stream()),
        "ncclBroadcast");
}

void send(Communicator& any, const Tensor& data, int peer) {
  GpuCommunicator& comm = as_gpu(any);
  check_tensor(comm, "send", data);
  check_peer(comm, "send", peer);
  comm.check_device();
  if (auto* one_gpu = as_one_gpu(comm)) return pairs_send(*one_gpu, data, peer);
  check(comm, ncclSend(data.data(), data.bytes(), ncclInt8, peer, nccl_of(comm), comm.stream()),
        "ncclSend");
}

void recv(Communicator& any, const Tensor& data, int peer) {
  GpuCommunicator& comm = as_gpu(any);
  check_tensor(comm, "recv", data);
  check_peer(comm, "recv", peer);
  comm.check_device();
  if (auto* one_gpu = as_one_gpu(comm)) return pairs_recv(*one_gpu, data, peer);
  check(comm, ncclRecv(data.data(), data.bytes(), ncclInt8, peer, nccl_of(comm), comm.stream()),
        "ncclRecv");
}

}  // namespace tandem::gpu
