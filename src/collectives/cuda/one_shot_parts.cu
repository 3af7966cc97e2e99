#include "collectives/cuda/one_shot_parts.h"

#include "collectives/cuda/exchange.cuh"
#include "collectives/cuda/piece.cuh"

namespace tandem::gpu {
namespace {

constexpr int kThreads = kExchangeThreads;

template <bool kAligned>
__device__ Piece<kAligned> part(const Partition& parts, const std::byte* whole, int rank) {
  return piece_of<kAligned>(whole + parts.begins[rank],
                            parts.begins[rank + 1] - parts.begins[rank]);
}

__device__ inline uint4* words_at(const ExchangeJob& job, int at, int index) {
  return reinterpret_cast<uint4*>(job.table.memory[at] + size_t(index) * job.slot_bytes);
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(ExchangeJob job, const __grid_constant__ Partition parts) {
  const EnteredCall call = enter_call(job);
  const int size = job.table.size, rank = job.table.rank, first = int(call.epoch % 2) * size;
  const int step = int(gridDim.x) * kThreads, begin = int(blockIdx.x) * kThreads + int(threadIdx.x);
  const Piece<kAligned> place = part<kAligned>(parts, parts.out, rank),
                        mine = piece_of<kAligned>(parts.in, place.bytes);
  for (int i = begin; i < mine.packs(); i += step) {
    const uint4 words = mine.load(i);
    for (int s = 1; s < size; ++s)
      words_at(job, call.receiver(job, (rank + s) % size), first + rank)[i] = words;
    if (place.at != mine.at) place.store(i, words);
  }
  if (!exchange_flags(job, 0, call)) return;
  for (int s = 1; s < size; ++s) {
    const int source = (rank + s) % size;
    const Piece<kAligned> theirs = part<kAligned>(parts, parts.out, source);
    const uint4* from = words_at(job, rank, first + source);
    for (int i = begin; i < theirs.packs(); i += step) theirs.store(i, load_fresh(from + i));
  }
}

template <bool kAligned, typename T>
__global__ void __launch_bounds__(kThreads)
    scatter_kernel(ExchangeJob job, const __grid_constant__ Partition parts) {
  const EnteredCall call = enter_call(job);
  const int size = job.table.size, rank = job.table.rank, first = int(call.epoch % 2) * size;
  const int step = int(gridDim.x) * kThreads, begin = int(blockIdx.x) * kThreads + int(threadIdx.x);
  for (int s = 1; s < size; ++s) {
    const int owner = (rank + s) % size;
    const Piece<kAligned> theirs = part<kAligned>(parts, parts.in, owner);
    uint4* to = words_at(job, call.receiver(job, owner), first + rank);
    for (int i = begin; i < theirs.packs(); i += step) to[i] = theirs.load(i);
  }
  if (!exchange_flags(job, 0, call)) return;
  const Piece<kAligned> mine = part<kAligned>(parts, parts.in, rank),
                        sum = piece_of<kAligned>(parts.out, mine.bytes);
  for (int i = begin; i < mine.packs(); i += step) {
    const uint4 own = mine.load(i);
    const Pack<T> added = sum_slots<T>(job, reinterpret_cast<const Pack<T>&>(own), first, i);
    sum.store(i, reinterpret_cast<const uint4&>(added));
  }
}

int blocks_for(int64_t packs) {
  return int(std::clamp<int64_t>((packs + kThreads - 1) / kThreads, 1, kMaxExchangeBlocks));
}

}  // namespace

OneShotParts::OneShotParts(NcclCommunicator& comm) : comm_(comm), calls_(sizeof(CallCounter)) {
  staging_ = std::static_pointer_cast<NcclBuffer>(comm.allocate(
      size_t(kMaxPartBytes) * size_t(2 * comm.size()), kMaxGpus * kMaxExchangeBlocks));
}

bool OneShotParts::fits(const Tensor& whole, int ranks) {
  return most_packs(partition_of(ranks, whole, whole, whole), ranks) * 16 <= kMaxPartBytes;
}

ExchangeJob OneShotParts::job(OpId op) const {
  return {.table = staging_->table(),
          .watch = comm_.watch(),
          .in = nullptr,
          .out = nullptr,
          .packs = 0,
          .slot_bytes = size_t(kMaxPartBytes),
          .calls = reinterpret_cast<CallCounter*>(calls_.data()),
          .op = op};
}

void OneShotParts::all_gather(const Tensor& shard, const Tensor& out, OpId op) {
  const Partition parts = partition_of(comm_.size(), out, shard, out);
  const int blocks = blocks_for(most_packs(parts, comm_.size()));
  const auto kernel = is_aligned(parts, comm_.size()) ? gather_kernel<true> : gather_kernel<false>;
  kernel<<<blocks, kThreads, 0, comm_.stream()>>>(job(op), parts);
  check_launch("all_gather");
}

void OneShotParts::reduce_scatter(const Tensor& data, const Tensor& shard, OpId op) {
  const Partition parts = partition_of(comm_.size(), data, data, shard);
  const int blocks = blocks_for(most_packs(parts, comm_.size()));
  with_float_type(data.dtype(), [&]<typename T>(T) {
    const auto kernel =
        is_aligned(parts, comm_.size()) ? scatter_kernel<true, T> : scatter_kernel<false, T>;
    kernel<<<blocks, kThreads, 0, comm_.stream()>>>(job(op), parts);
  });
  check_launch("reduce_scatter");
}

}  // namespace tandem::gpu
