#include "collectives/cuda/shard_exchange.h"

#include <algorithm>
#include <utility>

#include "collectives/cuda/shard_workers.cuh"
#include "core/cuda/load_module.cuh"
#include "tandem/collectives.h"

namespace tandem::gpu {
namespace {

// 2 KiB, a vec for each worker thread of an all-gather: smaller ones would leave threads idle and
// need as many signals.
constexpr int kMinChunkVecs = 128;

using Copiers = Group<4>;
using Adders = Group<8>;

template <bool kAligned>
__global__ void __launch_bounds__(Copiers::kThreads) all_gather_kernel(ShardParams params) {
  __shared__ unsigned done[Copiers::kThreads / 32];
  const Copiers group(done);
  if (params.role() == 0) {
    return send_local<kAligned>(params, kShards, group, params.in,
                                params.out + params.begins[params.table.rank],
                                [](int64_t) { return true; });
  }
  receive_shards<kAligned>(params, kShards, group);
}

template <bool kAligned, typename T>
__global__ void __launch_bounds__(Adders::kThreads, 2) reduce_scatter_kernel(ShardParams params) {
  __shared__ unsigned done[Adders::kThreads / 32];
  const Adders group(done);
  if (params.role() == 0) return send_shards<kAligned>(params, group);
  sum_local<kAligned, T>(params, params.in + params.begins[params.table.rank], params.out, group,
                         [](int64_t) {});
}

template <bool kAligned, typename T>
__global__ void __launch_bounds__(Adders::kThreads, 2) all_reduce_kernel(ShardParams params) {
  __shared__ unsigned done[Adders::kThreads / 32];
  const Adders group(done);
  const std::byte* local = params.in + params.begins[params.table.rank];
  std::byte* sum = params.out + params.begins[params.table.rank];
  const int role = params.role();
  if (role == 0) return send_shards<kAligned>(params, group);
  if (role == 3) return receive_shards<kAligned>(params, kSums, group);
  const Flow sums(params, kSums, true);
  if (role == 2) {
    return send_local<kAligned>(params, kSums, group, sum, sum,
                                [&](int64_t c) { return sums.wait_for_sum(c); });
  }
  sum_local<kAligned, T>(params, local, sum, group, [&](int64_t c) { sums.tell_summed(c); });
}

using Kernel = void (*)(ShardParams);

void require_summed(const char* what, DType dtype) {
  if (dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16) return;
  throw InvalidArgument(std::string(what) + ": dtype " + std::string(tandem::name_of(dtype)) +
                        ": expected f32, bf16 or f16");
}

}  // namespace

ShardExchange::ShardExchange(GpuCommunicator& comm)
    : comm_(comm),
      one_shot_(comm),
      counts_(sizeof(FlowCounts) * kFlowLanes * kShardChannels * kMaxGpus) {
  fifos_ = std::static_pointer_cast<GpuBuffer>(comm.allocate(
      size_t(kFlowLanes) * kShardChannels * size_t(comm.size()) * kFifoDepth * kMaxChunkVecs * 16,
      kFlowLanes * 2 * kMaxGpus * kShardChannels));
}

bool ShardExchange::fits(const Tensor& whole, ShardAlgorithm algorithm) const {
  return algorithm == ShardAlgorithm::pipelined || OneShotShards::fits(whole, comm_.size());
}

ShardAlgorithm ShardExchange::choose(const Tensor& whole) const {
  return fits(whole, ShardAlgorithm::one_shot) ? ShardAlgorithm::one_shot
                                               : ShardAlgorithm::pipelined;
}

template <typename Kernels>
void ShardExchange::launch(OpId op, const Partition& shards, int roles, int threads,
                           const Kernels& kernels) const {
  ShardParams params{shards,
                     fifos_->table(),
                     comm_.device_deadline(),
                     extend_deadline(comm_.device_deadline()),
                     op,
                     reinterpret_cast<FlowCounts*>(counts_.data()),
                     0,
                     0,
                     comm_.link_pacer()};
  const int64_t vecs = max_vecs(shards, comm_.size());
  params.vecs = int(std::clamp<int64_t>((vecs + kShardChannels - 1) / kShardChannels, kMinChunkVecs,
                                        kMaxChunkVecs));
  // Two blocks fit an SM.
  const int channels = std::clamp(this_share()->sms() * 2 / roles, 1, kShardChannels);
  params.channels = int(std::min<int64_t>((vecs + params.vecs - 1) / params.vecs, channels));
  const Kernel kernel = is_aligned(shards, comm_.size()) ? kernels.first : kernels.second;
  comm_.enqueue([&] {
    kernel<<<params.channels * roles, threads, 0, comm_.stream()>>>(params);
    check_launch(gpu::name_of(op).data());
  });
}

void ShardExchange::all_gather(const Tensor& shard, const Tensor& out, ShardAlgorithm algorithm,
                               OpId op) {
  if (out.bytes() == 0) return;
  const Enqueueing enqueueing(comm_);
  if (algorithm == ShardAlgorithm::one_shot) return one_shot_.all_gather(shard, out, op);
  launch(op, partition_of(comm_.size(), out, shard, out), 2, Copiers::kThreads,
         std::pair<Kernel, Kernel>{all_gather_kernel<true>, all_gather_kernel<false>});
}

void ShardExchange::reduce_scatter(const Tensor& data, const Tensor& shard,
                                   ShardAlgorithm algorithm, OpId op) {
  require_summed("reduce_scatter", data.dtype());
  if (data.bytes() == 0) return;
  const Enqueueing enqueueing(comm_);
  if (algorithm == ShardAlgorithm::one_shot) return one_shot_.reduce_scatter(data, shard, op);
  with_float_type(data.dtype(), [&]<typename T>(T) {
    launch(
        op, partition_of(comm_.size(), data, data, shard), 2, Adders::kThreads,
        std::pair<Kernel, Kernel>{reduce_scatter_kernel<true, T>, reduce_scatter_kernel<false, T>});
  });
}

void ShardExchange::all_reduce(const Tensor& in, const Tensor& out) {
  require_summed("all_reduce", in.dtype());
  if (in.bytes() == 0) return;
  const Enqueueing enqueueing(comm_);
  // Partition into whole 16-byte vectors, regardless of rows.
  Partition shards = partition_of(comm_.size(), (int64_t(in.bytes()) + 15) / 16, 16, in, out);
  for (int64_t& begin : shards.begins) begin = std::min(begin, int64_t(in.bytes()));
  with_float_type(in.dtype(), [&]<typename T>(T) {
    launch(OpId::all_reduce, shards, 4, Adders::kThreads,
           std::pair<Kernel, Kernel>{all_reduce_kernel<true, T>, all_reduce_kernel<false, T>});
  });
}

ShardExchange& shard_exchange(GpuCommunicator& comm) {
  return comm.attached<ShardExchange>([&] { return new ShardExchange(comm); });
}

}  // namespace tandem::gpu
