#include "collectives/cuda/one_shot_shards.h"

#include "collectives/cuda/exchange.cuh"
#include "comm/device/vector_range.cuh"
#include "core/cuda/load_module.cuh"

namespace tandem::gpu {
namespace {

template <bool kAligned>
__device__ VectorRange<kAligned> shard_of_rank(const Partition& shards, const std::byte* whole,
                                               int rank) {
  return vector_range<kAligned>(whole + shards.begins[rank],
                                shards.begins[rank + 1] - shards.begins[rank]);
}

__device__ inline uint4* words_at(const ExchangeParams& params, int at, int index) {
  return reinterpret_cast<uint4*>(params.table.memory[at] + size_t(index) * params.slot_bytes);
}

template <bool kAligned, int kRanks>
__global__ void __launch_bounds__(kExchangeThreads)
    gather_kernel(ExchangeParams params, const __grid_constant__ Partition shards) {
  const CallState call = enter_call(params);
  const int size = params.table.size, rank = params.table.rank, first = int(call.epoch % 2) * size;
  const int begin = first_vec(), step = vec_step();
  const VectorRange<kAligned> target = shard_of_rank<kAligned>(shards, shards.out, rank),
                              local = vector_range<kAligned>(shards.in, target.bytes);
  for (int i = begin; i < local.vecs(); i += step) {
    const uint4 words = local.load(i);
    for (int s = 1; s < size; ++s)
      words_at(params, call.receiver(params, peer_at(params.table, s)), first + rank)[i] = words;
    if (target.at != local.at) target.store(i, words);
  }
  if (!exchange_flags(params, 0, call, [&](int) { return local.bytes; })) return;
  const auto remote = [&](int source) {
    return shard_of_rank<kAligned>(shards, shards.out, source);
  };
  for (int i = begin; i < params.vecs; i += step) {
    copy_by_peer<kRanks, uint4>(
        params.table, [&](int source) { return i < remote(source).vecs(); },
        [&](int source) { return load_fresh(words_at(params, rank, first + source) + i); },
        [&](int source, const uint4& words) { remote(source).store(i, words); });
  }
}

template <bool kAligned, int kRanks, typename T>
__global__ void __launch_bounds__(kExchangeThreads)
    scatter_kernel(ExchangeParams params, const __grid_constant__ Partition shards) {
  const CallState call = enter_call(params);
  const int size = params.table.size, rank = params.table.rank, first = int(call.epoch % 2) * size;
  const int begin = first_vec(), step = vec_step();
  const auto remote = [&](int owner) { return shard_of_rank<kAligned>(shards, shards.in, owner); };
  for (int i = begin; i < params.vecs; i += step) {
    copy_by_peer<kRanks, uint4>(
        params.table, [&](int owner) { return i < remote(owner).vecs(); },
        [&](int owner) { return remote(owner).load(i); },
        [&](int owner, const uint4& words) {
          words_at(params, call.receiver(params, owner), first + rank)[i] = words;
        });
  }
  const VectorRange<kAligned> local = shard_of_rank<kAligned>(shards, shards.in, rank),
                              sum = vector_range<kAligned>(shards.out, local.bytes);
  uint4 prefetched{};
  if (begin < local.vecs()) prefetched = local.load(begin);  // loaded before the wait for the peers
  if (!exchange_flags(params, 0, call, [&](int owner) { return remote(owner).bytes; })) return;
  for (int i = begin; i < local.vecs(); i += step) {
    const Vec<T> added =
        sum_slots<kRanks, T>(params, reinterpret_cast<const Vec<T>&>(prefetched), first, i);
    if (i + step < local.vecs()) prefetched = local.load(i + step);
    sum.store(i, reinterpret_cast<const uint4&>(added));
  }
}

}  // namespace

OneShotShards::OneShotShards(GpuCommunicator& comm) : comm_(comm), calls_(sizeof(CallCounter)) {
  staging_ = std::static_pointer_cast<GpuBuffer>(comm.allocate(
      size_t(kMaxShardBytes) * size_t(2 * comm.size()), kMaxGpus * kMaxExchangeBlocks));
}

bool OneShotShards::fits(const Tensor& whole, int ranks) {
  return max_vecs(partition_of(ranks, whole, whole, whole), ranks) * 16 <= kMaxShardBytes;
}

ExchangeParams OneShotShards::make_params(const Partition& shards, OpId op) const {
  return {.table = staging_->table(),
          .deadline = comm_.device_deadline(),
          .in = nullptr,
          .out = nullptr,
          .vecs = max_vecs(shards, comm_.size()),
          .slot_bytes = size_t(kMaxShardBytes),
          .calls = reinterpret_cast<CallCounter*>(calls_.data()),
          .op = op,
          .link_pacer = comm_.link_pacer()};
}

void OneShotShards::all_gather(const Tensor& shard, const Tensor& out, OpId op) {
  const Partition shards = partition_of(comm_.size(), out, shard, out);
  const ExchangeParams call = make_params(shards, op);
  comm_.enqueue([&] {
    with_ranks(comm_.size(), [&]<int kRanks>() {
      const auto kernel = is_aligned(shards, comm_.size()) ? gather_kernel<true, kRanks>
                                                           : gather_kernel<false, kMaxGpus>;
      kernel<<<exchange_blocks(call.vecs), exchange_threads(call.vecs), 0, comm_.stream()>>>(
          call, shards);
    });
    check_launch("all_gather");
  });
}

void OneShotShards::reduce_scatter(const Tensor& data, const Tensor& shard, OpId op) {
  const Partition shards = partition_of(comm_.size(), data, data, shard);
  const ExchangeParams call = make_params(shards, op);
  comm_.enqueue([&] {
    with_float_type(data.dtype(), [&]<typename T>(T) {
      with_ranks(comm_.size(), [&]<int kRanks>() {
        const auto kernel = is_aligned(shards, comm_.size()) ? scatter_kernel<true, kRanks, T>
                                                             : scatter_kernel<false, kMaxGpus, T>;
        kernel<<<exchange_blocks(call.vecs), exchange_threads(call.vecs), 0, comm_.stream()>>>(
            call, shards);
      });
    });
    check_launch("reduce_scatter");
  });
}

}  // namespace tandem::gpu
