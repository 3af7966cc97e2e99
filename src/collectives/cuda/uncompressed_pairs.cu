#include "collectives/cuda/uncompressed_pairs.h"

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

#include "collectives/rows/rows.h"
#include "core/cuda/element.cuh"
#include "core/cuda/load_module.cuh"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256;

template <int kMaxRanks>
struct Sources {
  const void* of[kMaxRanks];
  int count;
};
using AllSources = Sources<kMaxSharing>;

__device__ int widened(int value) {
  return value;
}
template <typename T>
__device__ float widened(T value) {
  return to_float(value);
}

// Reduces in rank order; floats in f32, rounded once.
template <typename T, bool kMax, int kMaxRanks>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(Sources<kMaxRanks> sources, int64_t elements, T* out) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += step) {
    auto result = widened(static_cast<const T*>(sources.of[0])[i]);
    for (int r = 1; r < sources.count; ++r) {
      const auto value = widened(static_cast<const T*>(sources.of[r])[i]);
      if constexpr (kMax) {
        result = value > result ? value : result;
      } else {
        result += value;
      }
    }
    if constexpr (std::is_same_v<T, int>) {
      out[i] = result;
    } else {
      out[i] = from_float<T>(result);
    }
  }
}

template <int kMaxRanks>
void launch_reduce(const AllSources& all, const Tensor& out, ReduceOp op, cudaStream_t stream) {
  Sources<kMaxRanks> sources{{}, all.count};
  std::copy_n(all.of, kMaxRanks, sources.of);
  const int64_t elements = out.elements();
  if (elements == 0) return;
  const auto blocks =
      unsigned(std::min<int64_t>((elements + kThreads - 1) / kThreads, 4 * this_share()->sms()));
  const auto run = [&]<typename T>(T) {
    const auto kernel = op == ReduceOp::max ? reduce_kernel<T, true, kMaxRanks>
                                            : reduce_kernel<T, false, kMaxRanks>;
    kernel<<<blocks, kThreads, 0, stream>>>(sources, elements, out.as<T>());
  };
  if (out.dtype() == DType::i32) {
    run(int{});
  } else if (!with_float_type(out.dtype(), run)) {
    throw InvalidArgument("reduce: " + out.describe() + ": expected f32, bf16, f16 or i32");
  }
  check_launch("reduce_kernel");
}

void copy(const OneGpuCommunicator& comm, const void* from, void* to, size_t bytes) {
  if (from == to || bytes == 0) return;
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, comm.stream()), "copy the local shard");
}

// Contributions of the peers to a reduction, of equal size. Memory used by a captured call is kept
// when a larger call needs more.
struct Staging {
  std::vector<DeviceMemory> memory;
  std::byte* of(int rank, size_t bytes) const {
    return memory.back().data() + size_t(rank) * ((bytes + 15) / 16 * 16);
  }
};

Staging& staging(OneGpuCommunicator& comm, size_t bytes) {
  Staging& all = comm.attached<Staging>([] { return new Staging; });
  const size_t needed = size_t(comm.size()) * ((bytes + 15) / 16 * 16);
  if (all.memory.empty() || all.memory.back().bytes() < needed) {
    all.memory.emplace_back(std::bit_ceil(needed));
  }
  return all;
}

// `local(peer)`: data that this rank sends to `peer`; for itself: its contribution to the
// reduction.
template <typename Local>
void reduce(OneGpuCommunicator& comm, const Local& local, const Tensor& out, ReduceOp op, OpId id) {
  const Enqueueing enqueueing(comm);
  const Staging& staged = staging(comm, out.bytes());
  PairMessages messages;
  AllSources sources{};
  sources.count = comm.size();
  for (int r = 0; r < comm.size(); ++r) {
    const Tensor source = local(r);
    sources.of[r] = r == comm.rank() ? source.data() : staged.of(r, out.bytes());
    if (r == comm.rank()) continue;
    messages[size_t(r)] = {source.data(), int64_t(source.bytes()), staged.of(r, out.bytes()),
                           int64_t(out.bytes())};
  }
  comm.enqueue([&] {
    comm.pairs().run(messages, id);
    const auto launch =
        comm.size() <= kMaxGpus ? launch_reduce<kMaxGpus> : launch_reduce<kMaxSharing>;
    launch(sources, out, op, comm.stream());
  });
}

Tensor shard_in(const OneGpuCommunicator& comm, const Tensor& whole, int rank) {
  const Shard rows = shard_of(whole.dim(0), comm.size(), rank);
  return whole.rows(rows.begin, rows.count);
}

void gather(OneGpuCommunicator& comm, const Tensor& shard, const Tensor& out, OpId id) {
  const Enqueueing enqueueing(comm);
  PairMessages messages;
  for (int r = 0; r < comm.size(); ++r) {
    const Tensor remote = shard_in(comm, out, r);
    if (r == comm.rank()) continue;
    messages[size_t(r)] = {shard.data(), int64_t(shard.bytes()), remote.data(),
                           int64_t(remote.bytes())};
  }
  comm.enqueue([&] {
    copy(comm, shard.data(), shard_in(comm, out, comm.rank()).data(), shard.bytes());
    comm.pairs().run(messages, id);
  });
}

void require_peer(const OneGpuCommunicator& comm, const std::string& what, int peer) {
  if (peer != comm.rank()) return;
  throw InvalidArgument(what + ": rank " + std::to_string(peer) + ": expected another rank");
}

}  // namespace

void pairs_all_reduce(OneGpuCommunicator& comm, const Tensor& in, const Tensor& out, ReduceOp op) {
  if (comm.one_node() || in.elements() < comm.size()) {
    return reduce(
        comm, [&](int) { return in; }, out, op, OpId::all_reduce);
  }
  const auto flat = [](const Tensor& tensor) {
    return Tensor(tensor.data(), tensor.dtype(), {tensor.elements()}, tensor.device());
  };
  const Tensor from = flat(in), to = flat(out);
  const Tensor local_shard = shard_in(comm, to, comm.rank());
  reduce(
      comm, [&](int rank) { return shard_in(comm, from, rank); }, local_shard, op,
      OpId::all_reduce);
  gather(comm, local_shard, to, OpId::all_reduce);
}

void pairs_all_gather(OneGpuCommunicator& comm, const Tensor& shard, const Tensor& out) {
  gather(comm, shard, out, OpId::all_gather);
}

void pairs_reduce_scatter(OneGpuCommunicator& comm, const Tensor& data, const Tensor& shard,
                          ReduceOp op) {
  reduce(
      comm, [&](int rank) { return shard_in(comm, data, rank); }, shard, op, OpId::reduce_scatter);
}

void pairs_all_to_all(OneGpuCommunicator& comm, const Tensor& send,
                      std::span<const int64_t> send_counts, const Tensor& recv,
                      std::span<const int64_t> recv_counts) {
  const Enqueueing enqueueing(comm);
  PairMessages messages;
  const auto exchange = [&](int r, const Tensor& to, const Tensor& from) {
    messages[size_t(r)] = {to.data(), int64_t(to.bytes()), from.data(), int64_t(from.bytes())};
    if (r == comm.rank()) copy(comm, to.data(), from.data(), to.bytes());
  };
  collectives::for_each_pair(send, send_counts, recv, recv_counts, exchange);
  comm.enqueue([&] { comm.pairs().run(messages, OpId::all_to_all); });
}

void pairs_broadcast(OneGpuCommunicator& comm, const Tensor& data, int root) {
  const Enqueueing enqueueing(comm);
  PairMessages messages;
  for (int r = 0; r < comm.size(); ++r) {
    PairMessage& message = messages[size_t(r)];
    const auto bytes = int64_t(data.bytes());
    if (comm.rank() == root) {
      message = {data.data(), bytes, nullptr, 0};
    } else if (r == root) {
      message = {nullptr, 0, data.data(), bytes};
    }
  }
  comm.enqueue([&] { comm.pairs().run(messages, OpId::broadcast); });
}

void pairs_send(OneGpuCommunicator& comm, const Tensor& data, int peer) {
  require_peer(comm, "send", peer);
  PairMessages messages;
  messages[size_t(peer)] = {data.data(), int64_t(data.bytes()), nullptr, 0};
  comm.pairs().run(messages, OpId::send);
}

void pairs_exchange(OneGpuCommunicator& comm, const Tensor& sent, int to, const Tensor& received,
                    int from, cudaStream_t stream) {
  PairMessages messages;
  PairMessage& there = messages[size_t(to)];
  there.send = sent.data();
  there.send_bytes = int64_t(sent.bytes());
  PairMessage& here = messages[size_t(from)];
  here.recv = received.data();
  here.recv_bytes = int64_t(received.bytes());
  comm.pairs().run(messages, OpId::send, stream);
}

void pairs_recv(OneGpuCommunicator& comm, const Tensor& data, int peer) {
  require_peer(comm, "recv", peer);
  PairMessages messages;
  messages[size_t(peer)] = {nullptr, 0, data.data(), int64_t(data.bytes())};
  comm.pairs().run(messages, OpId::recv);
}

}  // namespace tandem::gpu
