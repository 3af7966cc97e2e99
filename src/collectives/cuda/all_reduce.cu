#include "collectives/cuda/all_reduce.h"

#include <algorithm>

#include "collectives/all_reduce_staging.h"
#include "collectives/cuda/all_reduce_norm.h"
#include "collectives/cuda/exchange.cuh"
#include "collectives/cuda/shard_exchange.h"
#include "collectives/cuda/uncompressed_nccl.h"
#include "core/cuda/early_start.cuh"
#include "core/cuda/load_module.cuh"
#include "kernels/cuda/add_norm.h"

namespace tandem::gpu {
namespace {

int64_t max_chosen_one_shot(int ranks) {
  return ranks <= 2 ? kOneShotBytes : kOneShotBytes / 2;
}

/// `early`: the kernels after it may start while it waits for the peers.
template <int kRanks, typename T>
__global__ void __launch_bounds__(kExchangeThreads)
    one_shot_kernel(ExchangeParams params, bool early) {
  if (early) let_next_start();
  wait_for_previous();
  const CallState call = enter_call(params);
  const int first = int(call.epoch % 2) * 2 * params.table.size;
  const int begin = first_vec(), step = vec_step();
  const auto* in = static_cast<const Vec<T>*>(params.in);
  auto* out = static_cast<Vec<T>*>(params.out);
  for (int i = begin; i < params.vecs; i += step) {
    const Vec<T> local = in[i];
    for (int s = 1; s < params.table.size; ++s) {
      const int peer = peer_at(params.table, s);
      slot<T>(params, call.receiver(params, peer), first + params.table.rank)[i] = local;
    }
  }
  if (!exchange_flags(params, 0, call, [&](int) { return params.vecs * 16; })) return;
  for (int i = begin; i < params.vecs; i += step) {
    out[i] = sum_slots<kRanks, T>(params, in[i], first, i);
  }
}

// Shard p of the tensor is vecs [p * shard, (p + 1) * shard); block b sums slice b of its rank's
// shard.
template <int kRanks, typename T>
__global__ void __launch_bounds__(kExchangeThreads)
    two_shot_kernel(ExchangeParams params, bool early) {
  if (early) let_next_start();
  wait_for_previous();
  const CallState call = enter_call(params);
  const int first = int(call.epoch % 2) * 2 * params.table.size, second = first + params.table.size;
  const int rank = params.table.rank, vecs = int(params.vecs);
  const int shard = (vecs + params.table.size - 1) / params.table.size;
  const int begin = first_vec(), step = vec_step();
  const auto* in = static_cast<const Vec<T>*>(params.in);
  auto* out = static_cast<Vec<T>*>(params.out);
  for (int i = begin; i < shard; i += step) {
    copy_by_peer<kRanks, Vec<T>>(
        params.table, [&](int owner) { return owner * shard + i < vecs; },
        [&](int owner) { return in[owner * shard + i]; },
        [&](int owner, const Vec<T>& vec) {
          slot<T>(params, call.receiver(params, owner), first + rank)[i] = vec;
        });
  }
  const auto bytes_of = [&](int owner) { return int64_t(min(shard, vecs - owner * shard)) * 16; };
  const int local = min(shard, vecs - rank * shard);
  Vec<T> prefetched;
  if (begin < local) prefetched = in[rank * shard + begin];  // loaded before the wait for the peers
  if (!exchange_flags(params, 0, call, bytes_of)) return;
  for (int i = begin; i < local; i += step) {
    const Vec<T> sum = sum_slots<kRanks, T>(params, prefetched, first, i);
    if (i + step < local) prefetched = in[rank * shard + i + step];
    out[rank * shard + i] = sum;
    for (int s = 1; s < params.table.size; ++s) {
      slot<T>(params, peer_at(params.table, s), second + rank)[i] = sum;
    }
  }
  if (!exchange_flags(params, 1, call, [&](int) { return bytes_of(rank); })) return;
  for (int i = begin; i < shard; i += step) {
    copy_by_peer<kRanks, Vec<T>>(
        params.table, [&](int owner) { return owner * shard + i < vecs; },
        [&](int owner) { return load_vec(slot<T>(params, rank, second + owner) + i); },
        [&](int owner, const Vec<T>& vec) { out[owner * shard + i] = vec; });
  }
}

}  // namespace

std::string_view name_of(AllReduceAlgorithm algorithm) {
  switch (algorithm) {
    case AllReduceAlgorithm::one_shot:
      return "one_shot";
    case AllReduceAlgorithm::two_shot:
      return "two_shot";
    case AllReduceAlgorithm::pipelined:
      return "pipelined";
    case AllReduceAlgorithm::nccl:
      return "nccl";
  }
  return "?";
}

AllReduce::AllReduce(GpuCommunicator& comm, int64_t max_elements, DType dtype, int64_t row, OpId op,
                     Sizes sizes)
    : comm_(comm), dtype_(dtype), op_(op), calls_(sizeof(CallCounter)) {
  if (dtype != DType::f32 && dtype != DType::bf16 && dtype != DType::f16) {
    throw InvalidArgument(std::string("all_reduce: dtype ") + std::string(tandem::name_of(dtype)) +
                          ": expected f32, bf16 or f16");
  }
  const int64_t bytes = max_elements * int64_t(size_of(dtype));
  const int64_t shard = row > 0 ? shard_bytes(max_elements, row) : 0;
  const AllReduceStaging staging = sizes == Sizes::this_one
                                       ? staging_for(bytes, comm.size(), shard)
                                       : staging_for_up_to(bytes, comm.size(), shard);
  capacity_ = staging.capacity;
  slot_bytes_ = staging.slot_bytes;
  staging_ = std::static_pointer_cast<GpuBuffer>(
      comm.allocate(size_t(staging.bytes(comm.size())), 2 * kMaxGpus * kMaxExchangeBlocks));
  prepare_nccl(comm);
}

int64_t AllReduce::shard_bytes(int64_t elements, int64_t row) const {
  return shard_rows(elements / row, comm_.size()) * row * int64_t(size_of(dtype_));
}

bool AllReduce::fits(int64_t elements, AllReduceAlgorithm algorithm, int64_t row) const {
  const int64_t bytes = elements * int64_t(size_of(dtype_));
  if (algorithm == AllReduceAlgorithm::nccl) return true;
  if (algorithm == AllReduceAlgorithm::pipelined) return row == 0 && comm_.size() > 1;
  if (algorithm == AllReduceAlgorithm::one_shot) return bytes % 16 == 0 && bytes <= slot_bytes_;
  if (row > 0 && shard_bytes(elements, row) > slot_bytes_) return false;
  return bytes % 16 == 0 && bytes <= capacity_;
}

AllReduceAlgorithm AllReduce::choose(int64_t elements) const {
  const int64_t bytes = elements * int64_t(size_of(dtype_));
  if (bytes > capacity_) return AllReduceAlgorithm::nccl;
  return bytes <= std::min(max_chosen_one_shot(comm_.size()), slot_bytes_)
             ? AllReduceAlgorithm::one_shot
             : AllReduceAlgorithm::two_shot;
}

void AllReduce::check_tensors(const Tensor& in, const Tensor& out, AllReduceAlgorithm algorithm,
                              int64_t row) const {
  if (in.dtype() != dtype_ || out.dtype() != dtype_ || in.elements() != out.elements()) {
    throw InvalidArgument("all_reduce: " + in.describe() + " to " + out.describe() +
                          ": expected equal sizes of dtype " +
                          std::string(tandem::name_of(dtype_)));
  }
  if (comm_.size() > 1 && !fits(in.elements(), algorithm, row)) {
    throw InvalidArgument("all_reduce: algorithm " + std::string(gpu::name_of(algorithm)) + ": " +
                          in.describe() +
                          (algorithm == AllReduceAlgorithm::pipelined
                               ? std::string(": expected another algorithm with an add_norm")
                               : ": expected a multiple of 16 bytes, at most " +
                                     std::to_string(capacity_ > 0 ? capacity_ : kMaxStagedBytes) +
                                     " (one_shot: " + std::to_string(slot_bytes_) + ")"));
  }
}

ExchangeParams AllReduce::make_params(const Tensor& in, const Tensor& out) const {
  return {staging_->table(),
          comm_.device_deadline(),
          in.data(),
          out.data(),
          int64_t(in.bytes()) / 16,
          size_t(slot_bytes_),
          reinterpret_cast<CallCounter*>(calls_.data()),
          op_,
          comm_.link_pacer()};
}

void AllReduce::run(const Tensor& in, const Tensor& out, AllReduceAlgorithm algorithm) {
  check_tensors(in, out, algorithm, 0);
  const int64_t vecs = int64_t(in.bytes()) / 16;
  if (in.bytes() == 0) return;
  const Enqueueing enqueueing(comm_);
  if (algorithm == AllReduceAlgorithm::nccl || comm_.size() == 1) {
    return nccl_all_reduce(comm_, in, out, ReduceOp::sum);
  }
  if (algorithm == AllReduceAlgorithm::pipelined) return shard_exchange(comm_).all_reduce(in, out);
  const ExchangeParams call = make_params(in, out);
  const int64_t of_all =
      algorithm == AllReduceAlgorithm::one_shot ? vecs : (vecs + comm_.size() - 1) / comm_.size();
  const int threads = exchange_threads(of_all), blocks = exchange_blocks(of_all);
  // Ranks that share a GPU could wait for each other's blocks to have room.
  const bool early = this_share()->alone();
  comm_.enqueue([&] {
    with_float_type(dtype_, [&]<typename T>(T) {
      with_ranks(comm_.size(), [&]<int kRanks>() {
        const auto kernel = algorithm == AllReduceAlgorithm::one_shot ? one_shot_kernel<kRanks, T>
                                                                      : two_shot_kernel<kRanks, T>;
        launch_early("all_reduce", kernel, unsigned(blocks), unsigned(threads), 0, comm_.stream(),
                     early, call, early);
      });
    });
  });
}

void AllReduce::run(const Tensor& in, const Tensor& out, AllReduceAlgorithm algorithm,
                    const AddNorm& add_norm) {
  const int64_t row = out.dims() == 2 ? out.dim(1) : 0;
  if (row == 0 || row * int64_t(size_of(dtype_)) % 16 != 0) {
    throw InvalidArgument("all_reduce: add_norm of " + out.describe() +
                          ": expected rows of a multiple of 16 bytes");
  }
  check_tensors(in, out, algorithm, row);
  if (in.bytes() == 0) return;
  if (comm_.size() == 1) return launch_add_norm(in, add_norm, out, comm_.stream());
  if (algorithm == AllReduceAlgorithm::nccl) {
    run(in, out, algorithm);
    return launch_add_norm(out, add_norm, out, comm_.stream());
  }
  const Enqueueing enqueueing(comm_);
  comm_.enqueue([&] {
    launch_all_reduce_norm(algorithm, make_params(in, out), add_norm, out, comm_.stream());
  });
}

}  // namespace tandem::gpu
