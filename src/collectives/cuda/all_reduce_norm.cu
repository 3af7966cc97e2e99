#include "collectives/cuda/all_reduce_norm.h"

#include <algorithm>

#include "collectives/cuda/exchange.cuh"
#include "core/cuda/load_module.cuh"
#include "kernels/cuda/add_norm.cuh"

namespace tandem::gpu {
namespace {

template <int kRanks, typename T>
__global__ void __launch_bounds__(kNormThreads)
    one_shot_norm_kernel(ExchangeParams params, NormRows rows) {
  const CallState call = enter_call(params);
  const int first = int(call.epoch % 2) * 2 * params.table.size;
  const auto* in = static_cast<const Vec<T>*>(params.in);
  const auto* residual = static_cast<const Vec<T>*>(rows.residual);
  auto* hidden = static_cast<Vec<T>*>(rows.hidden);
  for (int64_t row = blockIdx.x; row < rows.rows; row += gridDim.x) {
    const int64_t end = (row + 1) * rows.num_vecs;
    for (int64_t i = row * rows.num_vecs + threadIdx.x; i < end; i += kNormThreads) {
      const Vec<T> local = in[i];
      for (int s = 1; s < params.table.size; ++s) {
        const int peer = peer_at(params.table, s);
        slot<T>(params, call.receiver(params, peer), first + params.table.rank)[i] = local;
      }
    }
  }
  if (!exchange_flags(params, 0, call, [&](int) { return rows.rows * rows.num_vecs * 16; })) return;
  for (int64_t row = blockIdx.x; row < rows.rows; row += gridDim.x) {
    norm_row<T>(rows, row, [&](int64_t column) {
      const int64_t i = row * rows.num_vecs + column;
      const Vec<T> before = residual[i];
      const Vec<T> after = sum_slots<kRanks, T>(params, in[i], first, i, &before);
      hidden[i] = after;
      return after;
    });
  }
}

template <int kRanks, typename T>
__global__ void __launch_bounds__(kNormThreads)
    two_shot_norm_kernel(ExchangeParams params, NormRows rows) {
  const CallState call = enter_call(params);
  const int size = params.table.size, rank = params.table.rank;
  const int first = int(call.epoch % 2) * 2 * size, second = first + size;
  const int64_t shard = shard_rows(rows.rows, size), width = rows.num_vecs;
  const auto* in = static_cast<const Vec<T>*>(params.in);
  const auto* residual = static_cast<const Vec<T>*>(rows.residual);
  auto* hidden = static_cast<Vec<T>*>(rows.hidden);
  const auto rows_of = [&](int owner) { return min(shard, rows.rows - owner * shard); };
  const auto bytes_of = [&](int owner) { return rows_of(owner) * width * 16; };
  for (int64_t row = blockIdx.x; row < shard; row += gridDim.x) {
    for (int64_t i = threadIdx.x; i < width; i += kNormThreads) {
      copy_by_peer<kRanks, Vec<T>>(
          params.table, [&](int owner) { return row < rows_of(owner); },
          [&](int owner) { return in[(owner * shard + row) * width + i]; },
          [&](int owner, const Vec<T>& vec) {
            slot<T>(params, call.receiver(params, owner), first + rank)[row * width + i] = vec;
          });
    }
  }
  if (!exchange_flags(params, 0, call, bytes_of)) return;
  for (int64_t row = blockIdx.x; row < rows_of(rank); row += gridDim.x) {
    const int64_t begin = (rank * shard + row) * width;
    for (int64_t i = threadIdx.x; i < width; i += kNormThreads) {
      const Vec<T> before = residual[begin + i];
      const Vec<T> after =
          sum_slots<kRanks, T>(params, in[begin + i], first, row * width + i, &before);
      hidden[begin + i] = after;
      for (int s = 1; s < size; ++s) {
        slot<T>(params, peer_at(params.table, s), second + rank)[row * width + i] = after;
      }
    }
  }
  signal_peers(params, 1, call, [&](int) { return bytes_of(rank); });
  // Normalizes local rows while remote ones arrive; a thread reads its own writes.
  for (int64_t row = blockIdx.x; row < rows_of(rank); row += gridDim.x) {
    const int64_t begin = (rank * shard + row) * width;
    norm_row<T>(rows, rank * shard + row, [&](int64_t i) { return hidden[begin + i]; });
  }
  if (!wait_for_peers(params, 1, call)) return;
  for (int s = 1; s < size; ++s) {
    const int owner = peer_at(params.table, s);
    const Vec<T>* const from = slot<T>(params, rank, second + owner);
    for (int64_t row = blockIdx.x; row < rows_of(owner); row += gridDim.x) {
      const int64_t begin = (owner * shard + row) * width;
      norm_row<T>(rows, owner * shard + row, [&](int64_t i) {
        const Vec<T> after = load_vec(from + row * width + i);
        hidden[begin + i] = after;
        return after;
      });
    }
  }
}

}  // namespace

void launch_all_reduce_norm(AllReduceAlgorithm algorithm, const ExchangeParams& params,
                            const AddNorm& add_norm, const Tensor& out, cudaStream_t stream) {
  const NormRows rows = make_norm_rows(add_norm, out);
  const bool one_shot = algorithm == AllReduceAlgorithm::one_shot;
  const int64_t of_blocks = one_shot ? rows.rows : shard_rows(rows.rows, params.table.size);
  const int blocks =
      int(std::clamp<int64_t>(of_blocks, 1, this_share()->blocks(kMaxExchangeBlocks)));
  with_float_type(out.dtype(), [&]<typename T>(T) {
    with_ranks(params.table.size, [&]<int kRanks>() {
      const auto kernel =
          one_shot ? one_shot_norm_kernel<kRanks, T> : two_shot_norm_kernel<kRanks, T>;
      kernel<<<blocks, kNormThreads, 0, stream>>>(params, rows);
    });
  });
  check_launch("all_reduce_norm");
}

}  // namespace tandem::gpu
