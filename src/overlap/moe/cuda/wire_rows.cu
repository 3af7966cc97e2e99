#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"
#include "overlap/moe/cuda/exchange.cuh"
#include "overlap/moe/cuda/wire.cuh"
#include "overlap/moe/cuda/wire.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 512;

template <typename Block>
__global__ void __launch_bounds__(kThreads, 1)
    encode_rows_kernel(const __grid_constant__ MoeCall call,
                       const __grid_constant__ WireParams wire, const std::byte* x,
                       std::byte* messages, std::byte* local) {
  const size_t row_bytes = call.space.row_bytes();
  const unsigned here = 1u << call.table.rank;
  for_row_slices(call.rows, 0, wire.layout.blocks, [&](int64_t row, int64_t first) {
    const unsigned token_in_rank = call.token_in_rank[row];
    if (token_in_rank == 0) return;
    encode_row<Block>(wire, call.dtype, x + row * row_bytes, first,
                      token_in_rank & ~here ? messages + row * wire.layout.bytes : nullptr,
                      token_in_rank & here ? local + row * row_bytes : nullptr);
  });
}

/// Called by all threads: waits for the rows of `source`.
__device__ bool await_rows(const MoeCall& call, int source, uint64_t epoch,
                           const Deadline& deadline) {
  bool came = true;
  if (threadIdx.x == 0) {
    came = wait_signal(call.table.signals[call.table.rank] + MoeSpace::rows_signal(source), epoch,
                       deadline, OpId::all_to_all, source);
    if (!came) give_up(&call.state->calls, epoch);
  }
  return __syncthreads_and(came);
}

/// Called by a warp: whether one of `experts` is chosen.
__device__ bool chooses(const int32_t* chosen, int top_k, const schedule::Range& experts) {
  bool one = false;
  for (int i = lane(); i < top_k; i += 32) {
    one |= chosen[i] >= experts.begin && chosen[i] < experts.end();
  }
  return __any_sync(~0u, one);
}

// Waiters for decoded rows are signalled even if the rows did not arrive: the call has then failed,
// and its results are unused.
template <typename Block>
__global__ void __launch_bounds__(kThreads, 1)
    decode_rows_kernel(const __grid_constant__ MoeCall call,
                       const __grid_constant__ WireParams wire, const schedule::Range experts,
                       std::byte* rows, const Deadline deadline) {
  const int rank = call.table.rank, world = call.table.size, top_k = call.space.top_k;
  const size_t row_bytes = call.space.row_bytes();
  const uint64_t epoch = this_epoch(&call.state->calls);
  if (gave_up_before(&call.state->calls, epoch)) return;
  for (int step = 1; step < world; ++step) {
    const int source = schedule::moe_source(rank, world, step);
    if (await_rows(call, source, epoch, deadline)) {
      const auto* const chosen = at<const int32_t>(call, rank, call.space.experts_at(source));
      const auto* const messages =
          at<const std::byte>(call, rank, call.space.row_messages_at(rank, source));
      std::byte* const to = rows + call.space.rows_at(rank, source);
      for_row_slices(call.space.tokens, 0, wire.layout.blocks, [&](int64_t row, int64_t first) {
        if (!chooses(chosen + row * top_k, top_k, experts)) return;
        decode_row<Block>(wire, call.dtype, messages + row * wire.layout.bytes, first,
                          to + row * row_bytes);
      });
    }
    if (is_last_block(&call.state->decoded_rows[source]) && threadIdx.x == 0) {
      release_signal(call.table.signals[rank] + MoeSpace::decoded_signal(source), epoch);
    }
  }
}

}  // namespace

void launch_encode_rows(const MoeCall& call, const Wire& wire, const void* x, std::byte* messages,
                        void* local, cudaStream_t stream) {
  const WireParams params = WireParams::of(wire, call.space.hidden, call.dtype);
  const int64_t layout = (params.layout.blocks + kWarpBlocks - 1) / kWarpBlocks;
  const unsigned grid = blocks_for(call.space.tokens * layout, kThreads / 32, 2);
  with_block(wire, [&]<typename Block>() {
    encode_rows_kernel<Block><<<grid, kThreads, 0, stream>>>(
        call, params, static_cast<const std::byte*>(x), messages, static_cast<std::byte*>(local));
  });
  check_launch("encode_rows_kernel");
}

void launch_decode_rows(const MoeCall& call, const Wire& wire, schedule::Range experts,
                        std::byte* rows, int blocks, cudaStream_t stream) {
  const WireParams params = WireParams::of(wire, call.space.hidden, call.dtype);
  with_block(wire, [&]<typename Block>() {
    decode_rows_kernel<Block><<<unsigned(blocks), kThreads, 0, stream>>>(
        call, params, experts, rows, extend_deadline(call.deadline));
  });
  check_launch("decode_rows_kernel");
}

}  // namespace tandem::gpu
